// File systems of a few MiB, mounted by a test: to be filled, to be read-only, or to have features
// that the machine's disk lacks.
#ifndef HOLDFAST_TESTS_TESTING_SMALL_FILE_SYSTEM_H_
#define HOLDFAST_TESTS_TESTING_SMALL_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {

/// A mounted file system, unmounted and removed by the destructor.
class SmallFileSystem {
 public:
  /// \error Without the permission to mount, or without a program: the reason for a skip.
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Tmpfs(uint64_t bytes);
  /// Mounts a file with a file system on a loop device. `make` is the command that formats the
  /// file, e.g. "mkfs.ext4 -q -F"; the file's name is appended. `options` are further options of
  /// mount(8).
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Loop(const std::string& make,
                                                               const std::string& type,
                                                               uint64_t bytes,
                                                               const std::string& options = "");
  /// Mounts a directory of the machine's disk through a FUSE program: bindfs with `options`.
  /// `below` replaces the object's own directory and must outlive the object.
  static absl::StatusOr<std::unique_ptr<SmallFileSystem>> Fuse(const std::string& options,
                                                               std::string below = "");
  /// Mounts a directory through an overlay, as in a container.
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
