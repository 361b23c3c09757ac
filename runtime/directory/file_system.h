// Properties of a file system, looked up by its name.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_FILE_SYSTEM_H_
#define HOLDFAST_RUNTIME_DIRECTORY_FILE_SYSTEM_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace holdfast::directory {

struct FileSystem {
  std::string name;  ///< "ext4", "nfs", ..., or the magic number in hex.
  /// Only this machine's kernel writes to the file system, so flock(2) on a directory reaches every
  /// possible writer. On a network file system flock(2) on a directory may succeed on one machine
  /// only (NFS has no lock operation for directories).
  bool local = false;
  /// A process that is killed in a direct write ends after that write. On NFS the process ends
  /// first (the wait is killable), while the write still reads the process's memory.
  bool writes_end_with_process = false;
  /// A file keeps its inode number, and its time of modification changes with its bytes only.
  bool stable_inodes = false;
  uint64_t free_bytes = 0;  ///< For an unprivileged caller.
};

/// Asks statfs(2) about the file system that `fd` lies on.
absl::StatusOr<FileSystem> IdentifyFileSystem(int fd);

/// Returns the time by the file system's own clock, which sets the times of entries. A server's
/// clock may differ from this machine's. Touches `directory`. Returns this machine's time where
/// touching is refused.
absl::Time TimeOnFileSystem(int directory);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_FILE_SYSTEM_H_
