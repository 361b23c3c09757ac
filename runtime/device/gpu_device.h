// The GPUs of a driver, as devices.
#ifndef HOLDFAST_RUNTIME_DEVICE_GPU_DEVICE_H_
#define HOLDFAST_RUNTIME_DEVICE_GPU_DEVICE_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "holdfast/device.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "runtime/device/gpu_calls.h"

namespace holdfast::device {

/// Host ranges registered with one driver, process-wide. A registration is portable, so a second
/// device only adds a user. A range enters the book after its registration and leaves before its
/// removal, so that the book lists no unregistered range.
struct HostRanges {
  struct Range {
    size_t bytes = 0;
    bool foreign = false;  ///< Registered outside Holdfast; never unregistered here.
    /// Devices that use the range, each with its newest copy into or out of the range.
    std::map<int, CopyTicket> newest_copy;
  };
  base::Mutex mutex;
  std::map<char*, Range> ranges ABSL_GUARDED_BY(mutex);

  /// Notes that copy `ticket` of device `ordinal` uses the byte at `host`.
  void NoteCopy(const void* host, int ordinal, CopyTicket ticket);
};

/// The driver is loaded at the first Find, and a device is made at its first use. Never destroyed:
/// statics may use a device late.
class GpuDevices {
 public:
  /// `library`: see FindGpuCalls.
  explicit GpuDevices(GpuApi api, std::string library = "")
      : api_(api), library_(std::move(library)) {}

  /// \threadsafety May be called from any thread.
  /// \forksafety Fails in a forked child, without a call of the driver.
  absl::StatusOr<Device*> Find(int ordinal);

 private:
  absl::StatusOr<Device*> Make(int ordinal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GpuApi api_;
  const std::string library_;
  const base::ForkGuard fork_guard_;
  HostRanges host_ranges_;
  base::Mutex mutex_;
  std::optional<GpuCalls> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<int, Device*> by_ordinal_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::device

#endif  // HOLDFAST_RUNTIME_DEVICE_GPU_DEVICE_H_
