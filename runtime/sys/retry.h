// Retries of interrupted and short calls. Interruptions are retried for a limited time: a call that
// always fails with EINTR (a broken filter, a tracer) must not hold its caller for ever.
#ifndef HOLDFAST_RUNTIME_SYS_RETRY_H_
#define HOLDFAST_RUNTIME_SYS_RETRY_H_

#include <poll.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>

#include "runtime/sys/system.h"

namespace holdfast::sys {

inline constexpr uint64_t kInterruptedMaxNs = 10'000'000'000;

/// Repeats `call()` while the call fails with EINTR. Fails with EINTR after kInterruptedMaxNs.
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

/// Calls `write(done)` until `bytes` bytes are written. Returns 0 or an errno; EIO for a call that
/// writes nothing.
template <typename Write>
int WriteAll(uint64_t bytes, const Write& write) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t wrote = Uninterrupted([&] { return write(done); });
    if (wrote <= 0) return wrote < 0 ? errno : EIO;
    done += static_cast<uint64_t>(wrote);
  }
  return 0;
}

/// WriteAll of `from` at the file's position.
inline int WriteAll(int fd, const char* from, uint64_t bytes) {
  return WriteAll(bytes, [=](uint64_t done) { return Sys().write(fd, from + done, bytes - done); });
}

/// poll(2) for `timeout_ms` (not negative), across interruptions. -1 and EINTR when even the last
/// calls were interrupted: the state of the fds is then unknown.
int PollFor(struct pollfd* fds, nfds_t count, int timeout_ms);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_RETRY_H_
