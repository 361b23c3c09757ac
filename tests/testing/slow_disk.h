// A limit on the write rate of a test and its children to a disk, so that writes are in
// flight as long as a test needs.
#ifndef HOLDFAST_TESTS_TESTING_SLOW_DISK_H_
#define HOLDFAST_TESTS_TESTING_SLOW_DISK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace holdfast::testing {

/// A control group with an I/O limit. The process is a member during the object's lifetime; workers
/// started meanwhile stay members.
class SlowDisk {
 public:
  /// Limits the disk that holds `directory`.
  /// \error Without control groups, or with the directory on no disk: the reason for a skip.
  static absl::StatusOr<std::unique_ptr<SlowDisk>> Limit(const std::string& directory,
                                                         uint64_t bytes_per_second);
  ~SlowDisk();
  SlowDisk(const SlowDisk&) = delete;
  SlowDisk& operator=(const SlowDisk&) = delete;

 private:
  SlowDisk() = default;
  std::string group_;   // the directory of the group with the limit
  std::string before_;  // the process's former group
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SLOW_DISK_H_
