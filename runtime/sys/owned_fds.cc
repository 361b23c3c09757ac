// A fixed table of atomics: the child's handler runs in a process whose other threads are gone, so
// it must not take a lock that one of them may have held.
#include "runtime/sys/owned_fds.h"

#include <atomic>

#include "runtime/sys/system.h"

namespace holdfast::sys {
namespace {

// fds above this are left to close-on-exec alone. 4096 covers several hundred saves in flight.
constexpr int kTracked = 4096;
std::atomic<bool> g_owned[kTracked];

}  // namespace

void OwnFd(int fd) {
  if (fd >= 0 && fd < kTracked) g_owned[fd].store(true, std::memory_order_relaxed);
}

bool DisownFd(int fd) {
  return fd >= kTracked || (fd >= 0 && g_owned[fd].exchange(false, std::memory_order_relaxed));
}

void CloseOwnedFds() {
  for (int fd = 0; fd < kTracked; ++fd) {
    if (g_owned[fd].exchange(false, std::memory_order_relaxed)) Sys().close(fd);
  }
}

int OpenOwned(int directory, const char* path, int flags, mode_t mode) {
  const int fd = Sys().openat(directory, path, flags, mode);
  OwnFd(fd);
  return fd;
}

int CloseOwned(int fd) {
  DisownFd(fd);
  return Sys().close(fd);
}

}  // namespace holdfast::sys
