#include "runtime/checkpointer/single_file.h"

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/single_files.h"
#include "runtime/format/file_names.h"

namespace holdfast::checkpointer {

absl::Status ValidateSingleFile(const SaveRequest& request, const CheckpointerOptions& options) {
  const auto refuse = [&request](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("save the file ", request.name, ": ", why));
  };
  if (const char* wrong = format::WrongSingleFileName(request.name)) return refuse(wrong);
  if (request.plan == nullptr || request.plan->files.size() != 1 ||
      request.plan->files.front().name != request.name) {
    return refuse("a plan of one file of that name is needed");
  }
  if (options.world_size != 1) return refuse("every rank saves files of its own; world size is 1");
  if (options.retention.keep_last != 0) return refuse("retention is for directories alone");
  return absl::OkStatus();
}

absl::Status BeginFile(const SaveRequest& request, const AttemptId& attempt, SaveState* save) {
  HOLDFAST_ASSIGN_OR_RETURN(
      save->in_use,
      directory::BeginSingleFile(save->parent->get(), request.name, attempt, request.replace));
  return absl::OkStatus();
}

std::string TemporaryName(const SaveRequest& request, const AttemptId& attempt) {
  return format::CompanionName(
      {.file = request.name, .kind = format::CompanionKind::kTemporary, .attempt = attempt});
}

void RemoveUncommittedFile(const SaveState& save, const AttemptId& attempt) {
  const int directory = save.parent->get();
  if (directory::IsCommitted(directory, save.checkpoint, attempt)) return;
  (void)directory::RemoveCompanions(
      directory,
      {.file = save.checkpoint, .attempt = attempt, .has_manifest = true, .has_temporary = true});
}

absl::Status OutcomeOfFile(const SaveState& save, const absl::Status& outcome) {
  const int directory = save.parent->get();
  if (!directory::IsCommitted(directory, save.checkpoint, save.table->parameters().attempt))
    return outcome;
  // As in the worker: a save is durable only when its final name is durable.
  return directory::SyncDirectory(directory, absl::StrCat("of ", save.checkpoint));
}

}  // namespace holdfast::checkpointer
