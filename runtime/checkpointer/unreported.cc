#include "runtime/checkpointer/unreported.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "runtime/checkpointer/single_file.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"

namespace holdfast::checkpointer {

absl::Status Unreported(const SaveState& save, const absl::Status& outcome, bool reported) {
  if (outcome.ok() || reported) return outcome;
  if (save.single_file) return OutcomeOfFile(save, outcome);
  if (save.partial.empty() ||
      !directory::NameRefersTo(save.parent->get(), save.checkpoint, save.in_use.get())) {
    return outcome;
  }
  // As in the worker: a save is durable only when its final name is durable.
  return directory::SyncDirectory(save.parent->get(), absl::StrCat("of ", save.checkpoint));
}

bool IsBetweenTwoRenames(const SaveState& save) {
  struct stat existing {};
  if ((save.table->parameters().flags & layout::kReplaceExisting) == 0 ||
      sys::Sys().fstatat(save.parent->get(), save.checkpoint.c_str(), &existing,
                         AT_SYMLINK_NOFOLLOW) == 0) {
    return false;
  }
  const auto partial = directory::OpenDirectory(save.parent->get(), save.partial);
  return partial.ok() && directory::InspectUncommitted(partial->get()).state == Verdict::kSound;
}

std::vector<std::string> ReplacedNames(const SaveState& save, bool reported) {
  const writer::JobParameters& job = save.table->parameters();
  if (reported) return {save.result->left_behind};
  if ((job.flags & layout::kReplaceExisting) == 0) return {};
  // The worker was killed after its exchange and did not report the name of the old checkpoint.
  std::vector<std::string> names = {save.partial};
  for (const AttemptId& older : job.older) {
    names.push_back(format::FormatDirectoryName({.checkpoint = save.checkpoint,
                                                 .kind = format::DirectoryKind::kRetired,
                                                 .attempt = older}));
  }
  return names;
}

}  // namespace holdfast::checkpointer
