#include "runtime/sys/retry.h"

namespace holdfast::sys {

int PollFor(pollfd* fds, nfds_t count, int timeout_ms) {
  // Also after the time has passed: a single interruption may be chance.
  constexpr int kTriesMin = 100;
  const uint64_t end = NowNs() + static_cast<uint64_t>(timeout_ms) * kNsPerMs;
  int left_ms = timeout_ms;
  for (int tries = 1;; ++tries) {
    const int ready = Sys().poll(fds, count, left_ms);
    if (ready >= 0 || errno != EINTR) return ready;
    const uint64_t now = NowNs();
    if (now >= end && tries >= kTriesMin) {
      errno = EINTR;
      return -1;
    }
    left_ms = now >= end ? 0 : static_cast<int>((end - now - 1) / kNsPerMs + 1);
  }
}

}  // namespace holdfast::sys
