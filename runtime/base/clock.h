// The clock of deadlines and measured times.
#ifndef HOLDFAST_RUNTIME_BASE_CLOCK_H_
#define HOLDFAST_RUNTIME_BASE_CLOCK_H_

#include "absl/time/time.h"
#include "runtime/sys/system.h"

namespace holdfast::base {

/// Now on the monotonic clock: whoever sets the machine's time ends no wait and stretches none.
/// Only differences and comparisons with others of its kind mean anything.
inline absl::Time Now() { return absl::UnixEpoch() + absl::Nanoseconds(sys::NowNs()); }

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_CLOCK_H_
