// A fixed table of atomic bits: the child's handler runs in a process whose other threads are gone,
// so it must not take a lock that one of them may have held.
#include "runtime/sys/owned_fds.h"

#include <atomic>
#include <bit>
#include <cstdint>

#include "runtime/sys/system.h"

namespace holdfast::sys {
namespace {

// As many as a process may have by the kernel's default (fs.nr_open); any above are left to
// close-on-exec alone. 128 KiB, of which only the pages in use exist.
constexpr int kTracked = 1 << 20;
constexpr int kBits = 64;
std::atomic<uint64_t> g_owned[kTracked / kBits];

uint64_t BitOf(int fd) { return uint64_t{1} << (fd % kBits); }

}  // namespace

void OwnFd(int fd) {
  if (fd >= 0 && fd < kTracked) g_owned[fd / kBits].fetch_or(BitOf(fd), std::memory_order_relaxed);
}

bool DisownFd(int fd) {
  if (fd < 0 || fd >= kTracked) return fd >= kTracked;
  const uint64_t before = g_owned[fd / kBits].fetch_and(~BitOf(fd), std::memory_order_relaxed);
  return (before & BitOf(fd)) != 0;
}

void CloseOwnedFds() {
  for (int word = 0; word < kTracked / kBits; ++word) {
    // A look first: a store would make the page.
    if (g_owned[word].load(std::memory_order_relaxed) == 0) continue;
    for (uint64_t owned = g_owned[word].exchange(0, std::memory_order_relaxed); owned != 0;
         owned &= owned - 1) {
      Sys().close(word * kBits + std::countr_zero(owned));
    }
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
