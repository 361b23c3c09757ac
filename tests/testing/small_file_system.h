// File systems of a few MiB that a test mounts for itself: to be filled, to be made read-only, to
// have what the machine's own disk has not.
#ifndef HOLDFAST_TESTS_TESTING_SMALL_FILE_SYSTEM_H_
#define HOLDFAST_TESTS_TESTING_SMALL_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {

/// Unmounted and removed at its end.
class SmallFileSystem {
 public:
  /// \error where mounting is not permitted, or a program is missing: the reason to skip.
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Tmpfs(uint64_t bytes);
  /// A file with a file system in it, on a loop device. `make` is a command that makes it, e.g.
  /// "mkfs.ext4 -q -F"; the file's name is appended. `options` are more ones of mount(8).
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Loop(const std::string& make,
                                                               const std::string& type,
                                                               uint64_t bytes,
                                                               const std::string& options = "");
  /// A directory of the machine's own disk, seen through a FUSE program: bindfs with `options`.
  /// `below`: that directory, in place of one of its own; it outlives this object.
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Fuse(const std::string& options,
                                                               std::string below = "");
  /// The same through an overlay, as in a container.
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Overlay();
  ~SmallFileSystem();
  SmallFileSystem(const SmallFileSystem&) = delete;
  SmallFileSystem& operator=(const SmallFileSystem&) = delete;

  const std::string& path() const { return path_; }
  absl::Status SetReadOnly(bool on);
  uint64_t FreeBytes() const;

 private:
  SmallFileSystem();
  /// Runs a mount command.
  absl::Status MountBy(const std::string& command);
  ScratchDirectory scratch_;
  std::string path_;
  std::string type_;
  bool mounted_ = false;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SMALL_FILE_SYSTEM_H_
