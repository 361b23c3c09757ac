#include "runtime/directory/removal.h"

#include <sys/file.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/rename.h"
#include "runtime/directory/replacement.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/job.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/job_run.h"
#include "runtime/worker/remove_tree.h"

namespace holdfast::directory {
absl::StatusOr<RetiredCheckpoint> RetireCheckpoint(int parent, const CheckpointInfo& checkpoint) {
  auto directory = OpenDirectory(parent, checkpoint.name);
  if (!directory.ok()) return directory.status();
  RetiredCheckpoint retired = {.name = {}, .in_use = *std::move(directory)};
  const auto moved_on = [&checkpoint] {
    return absl::AbortedError(
        absl::StrCat("remove ", checkpoint.name, ": another save has taken its place meanwhile"));
  };
  if (InspectCommitted(retired.in_use.get()).info.attempt != checkpoint.attempt) return moved_on();
  // A save must not exchange the name between its look and its rename.
  const auto lock = LockRemovable(retired.in_use.get(), checkpoint.name);
  // A save may have exchanged the name before the lock. Its checkpoint must not have a retired name
  // for a moment: after a crash in between, a recovery would remove the checkpoint.
  if (!NameRefersTo(parent, checkpoint.name, retired.in_use.get())) return moved_on();
  if (!lock.ok()) return lock.status();
  // Without the lock two removals would run concurrently, so its failure is no error.
  sys::Sys().flock(retired.in_use.get(), LOCK_SH | LOCK_NB);
  HOLDFAST_ASSIGN_OR_RETURN(retired.name, RenameToFree(parent, checkpoint.name,
                                                       {.checkpoint = checkpoint.name,
                                                        .kind = format::DirectoryKind::kRetired,
                                                        .attempt = checkpoint.attempt}));
  if (!NameRefersTo(parent, retired.name, retired.in_use.get())) {
    // Replaced between look and rename: the new checkpoint gets its name back.
    HOLDFAST_RETURN_IF_ERROR(RenameNoReplace(parent, retired.name, checkpoint.name));
    return moved_on();
  }
  // Before the first file is removed: power loss must not give the name back to a damaged
  // directory.
  HOLDFAST_RETURN_IF_ERROR(SyncDirectory(parent, absl::StrCat("of ", checkpoint.name)));
  return retired;
}

bool IsOfASave(int directory) {
  const auto names = ListNames(directory, "directory");
  if (!names.ok()) return false;
  return names->empty() || std::any_of(names->begin(), names->end(), [](const std::string& name) {
           return worker::IsProof(name.c_str());
         });
}

absl::Status CheckRemovable(int directory, const std::string& name) {
  if (!IsOfASave(directory)) {
    return absl::FailedPreconditionError(
        "it holds files and no mark of a save; rename the directory, or remove it yourself");
  }
  std::vector<char> buffer(worker::kDirectoryBufferBytes);
  const worker::Contents contents = worker::LookInto(directory, buffer.data());
  if (contents.error_number != 0) return base::ErrnoStatus("read", name, contents.error_number);
  return contents.holds_directory || worker::MustKeep(contents, name.c_str())
             ? RefuseForeign(name, contents.foreign)
             : absl::OkStatus();
}

absl::Status RemoveDirectory(int parent, const std::string& name) {
  std::vector<char> buffer(worker::kDirectoryBufferBytes);
  const auto job = std::make_unique<layout::Job>();  // The job's counters are not read.
  Failure failure;
  if (worker::RemoveDirectory(parent, name.c_str(), buffer.data(), job.get(), &failure)) {
    return absl::OkStatus();
  }
  if (failure.code != FailureCode::kFailedPrecondition) {
    return base::ErrnoStatus("remove", name, failure.error_number);
  }
  return RefuseForeign(name, job->completion.foreign);
}

}  // namespace holdfast::directory
