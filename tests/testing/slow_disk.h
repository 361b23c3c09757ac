// A limit on what this process and its children write to one disk, so that writes are in flight for
// as long as a test needs.
#ifndef HOLDFAST_TESTS_TESTING_SLOW_DISK_H_
#define HOLDFAST_TESTS_TESTING_SLOW_DISK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace holdfast::testing {

/// A control group with an I/O limit. The process is a member while the object lives; workers that
/// it starts meanwhile are members for good.
class SlowDisk {
 public:
  /// Limits the disk that holds `directory`.
  /// \error where control groups cannot be made, or the directory is on no disk: the reason to
  /// skip.
  static absl::StatusOr<std::unique_ptr<SlowDisk>> Limit(const std::string& directory,
                                                         uint64_t bytes_per_second);
  ~SlowDisk();
  SlowDisk(const SlowDisk&) = delete;
  SlowDisk& operator=(const SlowDisk&) = delete;

 private:
  SlowDisk() = default;
  std::string group_;   // the directory of the group with the limit
  std::string before_;  // and of the group that the process came from
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SLOW_DISK_H_
