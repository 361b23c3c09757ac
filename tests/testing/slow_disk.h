// A file system with a limit on the write rate of a test and its children, so that writes are in
// flight as long as a test needs.
#ifndef HOLDFAST_TESTS_TESTING_SLOW_DISK_H_
#define HOLDFAST_TESTS_TESTING_SLOW_DISK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/testing/small_file_system.h"

namespace holdfast::testing {

/// A mounted file system, and a control group with a limit on I/O to it. The process is a member
/// during the object's lifetime; workers started meanwhile stay members. No other test waits for
/// the limit: the journal is the file system's own.
class SlowDisk {
 public:
  /// \error Without control groups, or without the permission to mount: the reason for a skip.
  static absl::StatusOr<std::unique_ptr<SlowDisk>> Mount(uint64_t bytes_per_second);
  ~SlowDisk();
  SlowDisk(const SlowDisk&) = delete;
  SlowDisk& operator=(const SlowDisk&) = delete;

  /// An empty directory of the file system.
  const std::string& path() const { return path_; }

 private:
  SlowDisk() = default;
  std::unique_ptr<SmallFileSystem> file_system_;
  std::string path_;
  std::string group_;   // the directory of the group with the limit
  std::string before_;  // the process's former group
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SLOW_DISK_H_
