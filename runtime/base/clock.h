// The clock of deadlines and measured times.
#ifndef HOLDFAST_RUNTIME_BASE_CLOCK_H_
#define HOLDFAST_RUNTIME_BASE_CLOCK_H_

#include <time.h>

#include <cstdint>

#include "absl/time/time.h"
#include "runtime/sys/system.h"

namespace holdfast::base {

/// Returns the monotonic time: setting the machine's clock neither ends nor extends a wait. Only
/// differences and comparisons between such times are meaningful.
inline absl::Time Now() { return absl::UnixEpoch() + absl::Nanoseconds(sys::NowNs()); }

/// Returns the time of day, for records on disk and comparisons between processes.
inline absl::Time WallTime() {
  struct timespec now = {};
  sys::Sys().clock_gettime(CLOCK_REALTIME, &now);
  return absl::TimeFromTimespec(now);
}

/// WallTime in nanoseconds since 1970, as records on disk have it.
inline uint64_t WallNs() { return static_cast<uint64_t>(absl::ToUnixNanos(WallTime())); }

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_CLOCK_H_
