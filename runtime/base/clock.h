// The clock of deadlines and measured times.
#ifndef HOLDFAST_RUNTIME_BASE_CLOCK_H_
#define HOLDFAST_RUNTIME_BASE_CLOCK_H_

#include <time.h>

#include "absl/time/time.h"
#include "runtime/sys/system.h"

namespace holdfast::base {

/// Now on the monotonic clock: whoever sets the machine's time ends no wait and stretches none.
/// Only differences and comparisons with others of its kind mean anything.
inline absl::Time Now() { return absl::UnixEpoch() + absl::Nanoseconds(sys::NowNs()); }

/// The time of day, for what is recorded on disk and compared between processes.
inline absl::Time WallTime() {
  struct timespec now = {};
  sys::Sys().clock_gettime(CLOCK_REALTIME, &now);
  return absl::TimeFromTimespec(now);
}

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_CLOCK_H_
