// What is known about a file system by its name.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_FILE_SYSTEM_H_
#define HOLDFAST_RUNTIME_DIRECTORY_FILE_SYSTEM_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace holdfast::directory {

struct FileSystem {
  std::string name;  ///< "ext4", "nfs", ..., or the magic number in hex.
  /// Only this machine's kernel writes to it, so that flock(2) on a directory is seen by everyone
  /// who could be writing there. On a network file system flock(2) on a directory may succeed and
  /// yet be known to one machine only (NFS has no lock operation for directories).
  bool local = false;
  /// A process that is killed in a direct write ends after that write. NFS lets the process end
  /// first (its wait is killable), with the write still reading the process's memory.
  bool writes_end_with_process = false;
  uint64_t free_bytes = 0;  ///< For an unprivileged caller.
};

/// Asks statfs(2) about the file system that `fd` lies on.
absl::StatusOr<FileSystem> IdentifyFileSystem(int fd);

/// The time by the file system's own clock, which the times of its entries follow: the clock of a
/// server may differ from this machine's. Touches `directory`. Where that is refused, the time of
/// this machine.
absl::Time TimeOnFileSystem(int directory);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_FILE_SYSTEM_H_
