// Calls that a signal interrupted, made again for a limited time: a call that always says EINTR (a
// broken filter, a tracer) must end its caller, not keep it for good.
#ifndef HOLDFAST_RUNTIME_SYS_RETRY_H_
#define HOLDFAST_RUNTIME_SYS_RETRY_H_

#include <poll.h>

#include <cerrno>
#include <cstdint>

#include "runtime/sys/system.h"

namespace holdfast::sys {

inline constexpr uint64_t kInterruptedMaxNs = 10'000'000'000;

/// `call()`, and again while it fails with EINTR; after kInterruptedMaxNs its result and errno are
/// EINTR's.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  if (result >= 0 || errno != EINTR) return result;
  for (const uint64_t end = NowNs() + kInterruptedMaxNs;
       result < 0 && errno == EINTR && NowNs() < end;) {
    result = call();
  }
  return result;
}

/// poll(2) for `timeout_ms` (not negative), whatever interrupts it. -1 and EINTR when not even the
/// last calls came through: then nothing is known of the fds.
int PollFor(struct pollfd* fds, nfds_t count, int timeout_ms);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_RETRY_H_
