#include "runtime/directory/removal.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/rename.h"
#include "runtime/directory/replacement.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/system.h"

namespace holdfast::directory {
namespace {

absl::Status Unlink(int directory, const std::string& name, int flags) {
  if (sys::Sys().unlinkat(directory, name.c_str(), flags) == 0 || errno == ENOENT) {
    return absl::OkStatus();
  }
  return base::ErrnoStatus("remove", name, errno);
}

}  // namespace

absl::StatusOr<RetiredCheckpoint> RetireCheckpoint(int parent, const CheckpointInfo& checkpoint) {
  auto directory = OpenDirectory(parent, checkpoint.name);
  if (!directory.ok()) return directory.status();
  RetiredCheckpoint retired = {.name = {}, .in_use = *std::move(directory)};
  const auto moved_on = [&checkpoint] {
    return absl::AbortedError(
        absl::StrCat("remove ", checkpoint.name, ": another save has taken its place meanwhile"));
  };
  if (InspectCommitted(retired.in_use.get()).info.attempt != checkpoint.attempt) return moved_on();
  HOLDFAST_RETURN_IF_ERROR(CheckRemovable(retired.in_use.get(), checkpoint.name));
  // Without the lock two removals would merely run side by side, so its failure is no error.
  sys::Sys().flock(retired.in_use.get(), LOCK_SH | LOCK_NB);
  HOLDFAST_ASSIGN_OR_RETURN(retired.name, RenameToFree(parent, checkpoint.name,
                                                       {.checkpoint = checkpoint.name,
                                                        .kind = format::DirectoryKind::kRetired,
                                                        .attempt = checkpoint.attempt}));
  if (!NameRefersTo(parent, retired.name, retired.in_use.get())) {
    // Replaced between the look and the rename: it gets its name back.
    HOLDFAST_RETURN_IF_ERROR(RenameNoReplace(parent, retired.name, checkpoint.name));
    return moved_on();
  }
  // Before the first file goes: power loss must not bring the name back to a ruin.
  HOLDFAST_RETURN_IF_ERROR(SyncDirectory(parent, absl::StrCat("of ", checkpoint.name)));
  return retired;
}

absl::Status RemoveDirectory(int parent, const std::string& name) {
  auto directory = OpenDirectory(parent, name);
  if (absl::IsNotFound(directory.status())) return absl::OkStatus();
  if (!directory.ok()) return directory.status();
  HOLDFAST_RETURN_IF_ERROR(CheckRemovable(directory->get(), name));
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                            ListDirectory(directory->get()));
  bool has_manifest = false;
  for (const DirectoryEntry& entry : entries) {
    if (entry.is_directory) {
      return absl::FailedPreconditionError(absl::StrCat("remove ", name, ": it holds a directory, ",
                                                        entry.name, ", that is not Holdfast's"));
    }
    has_manifest |= format::IsCommitFile(entry.name);
  }
  if (has_manifest) {
    for (const DirectoryEntry& entry : entries) {
      if (!format::IsCommitFile(entry.name)) continue;
      HOLDFAST_RETURN_IF_ERROR(Unlink(directory->get(), entry.name, 0));
    }
    // Power loss from here on: data files may come back or not, but no manifest that speaks for
    // them does.
    HOLDFAST_RETURN_IF_ERROR(SyncDirectory(directory->get(), name));
  }
  for (const DirectoryEntry& entry : entries) {
    if (format::IsCommitFile(entry.name)) continue;
    HOLDFAST_RETURN_IF_ERROR(Unlink(directory->get(), entry.name, 0));
  }
  HOLDFAST_RETURN_IF_ERROR(Unlink(parent, name, AT_REMOVEDIR));
  // Otherwise power loss brings an empty directory back. Harmless, but "removed" was reported.
  return SyncDirectory(parent, absl::StrCat("of ", name));
}

}  // namespace holdfast::directory
