// Directories and small files by fd: open, list, read, sync, all through the table of system calls.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_DIRECTORY_ACCESS_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_DIRECTORY_ACCESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::checkpointer {

/// Opens a directory for reading, without following a symbolic link in the last component.
/// `parent` may be AT_FDCWD.
absl::StatusOr<base::UniqueFd> OpenDirectory(int parent, const std::string& name);

/// Makes a directory, or finds it, and opens it. \error kNotFound when it went away between the
/// two, kFailedPrecondition when `parent` was removed; errors of mkdir and open.
absl::StatusOr<base::UniqueFd> MakeDirectory(int parent, const std::string& name);

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;  ///< Asked from the inode where the listing does not tell.
};

/// Everything but "." and "..", sorted by name. \error kResourceExhausted for more than a million
/// entries: no directory of checkpoints has them.
absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(int directory);

/// A whole regular file of at most `bytes_max` bytes, not through a symbolic link.
absl::StatusOr<std::string> ReadFile(int directory, const std::string& name, uint64_t bytes_max);

/// fsync(2) of a directory: its entries survive power loss.
absl::Status SyncDirectory(int directory, absl::string_view name);

/// Whether `name` below `parent` is the inode that `fd` has open. A directory's name may have been
/// taken away between opening and locking it.
bool NameRefersTo(int parent, const std::string& name, int fd);

/// Sleeps, through the table.
void Pause(absl::Duration time);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_DIRECTORY_ACCESS_H_
