// The time in which a loop did not run.
#ifndef HOLDFAST_RUNTIME_SYS_OWN_GAP_H_
#define HOLDFAST_RUNTIME_SYS_OWN_GAP_H_

#include <cstdint>

#include "runtime/sys/system.h"

namespace holdfast::sys {

/// Tells a loop that its process was stopped, as by SIGSTOP or a freezer. The watched processes may
/// have been stopped, too: silence in this time is no proof.
class OwnGap {
 public:
  static constexpr uint64_t kLeastNs = 5 * kNsPerSecond;

  /// Called in each round of a loop that sleeps less than `least_ns`. Returns the time since the
  /// last call, or 0 for less than `least_ns`.
  uint64_t Round(uint64_t now_ns, uint64_t least_ns = kLeastNs) {
    const uint64_t gap = last_ns_ == 0 || now_ns < last_ns_ ? 0 : now_ns - last_ns_;
    last_ns_ = now_ns;
    return gap < least_ns ? 0 : gap;
  }

  /// Moves the begin of a silence behind a gap.
  static void Forgive(uint64_t gap_ns, uint64_t now_ns, uint64_t* since_ns) {
    if (gap_ns != 0) *since_ns = now_ns - *since_ns < gap_ns ? now_ns : *since_ns + gap_ns;
  }

 private:
  uint64_t last_ns_ = 0;
};

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_OWN_GAP_H_
