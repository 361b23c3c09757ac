// A fixed table of atomic bits. The child's handler runs in a process without its other threads and
// must not take a lock that such a thread may have held. For the same reason two counters keep
// fork(2) out of sections; the child resets both.
#include "runtime/sys/owned_fds.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/eventfd.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#include "runtime/sys/system.h"

namespace holdfast::sys {
namespace {

// The kernel's default limit of fds per process (fs.nr_open). Higher fds rely on close-on-exec
// alone. 128 KiB, of which only the pages in use exist.
constexpr int kTracked = 1 << 20;
constexpr int kBits = 64;
std::atomic<uint64_t> g_owned[kTracked / kBits];

// Sections under way, and forks. All accesses are seq_cst: each side announces itself and then
// reads the other side's counter, so that at least one side sees the other.
std::atomic<uint32_t> g_sections{0};
std::atomic<uint32_t> g_forks{0};

std::atomic<uint32_t> g_forks_that_closed{0};

constexpr uint64_t kWaitMaxNs = 5'000'000'000;
constexpr timespec kStep = {.tv_sec = 0, .tv_nsec = 20'000};

/// Returns false when the time has passed.
bool AwaitZero(const std::atomic<uint32_t>& count) {
  if (count.load() == 0) return true;
  const uint64_t end = NowNs() + kWaitMaxNs;
  while (count.load() != 0) {
    if (NowNs() > end) return false;
    Sys().nanosleep(&kStep, nullptr);
  }
  return true;
}

/// Keeps forks of other threads out during its lifetime. Holds one or two system calls and no code
/// that takes a lock.
class Section {
 public:
  Section() {
    g_sections.fetch_add(1);
    while (g_forks.load() != 0) {
      g_sections.fetch_sub(1);
      const bool waited = AwaitZero(g_forks);
      g_sections.fetch_add(1);
      if (!waited) break;
    }
  }
  ~Section() { g_sections.fetch_sub(1); }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
};

uint64_t BitOf(int fd) { return uint64_t{1} << (fd % kBits); }

int Own(int fd) {
  if (fd >= 0 && fd < kTracked) g_owned[fd / kBits].fetch_or(BitOf(fd), std::memory_order_relaxed);
  return fd;
}

bool Disown(int fd) {
  if (fd < 0 || fd >= kTracked) return fd >= kTracked;
  const uint64_t before = g_owned[fd / kBits].fetch_and(~BitOf(fd), std::memory_order_relaxed);
  return (before & BitOf(fd)) != 0;
}

void CloseAllOwned() {
  for (int word = 0; word < kTracked / kBits; ++word) {
    // Read first: a store would allocate the page.
    if (g_owned[word].load(std::memory_order_relaxed) == 0) continue;
    for (uint64_t owned = g_owned[word].exchange(0, std::memory_order_relaxed); owned != 0;
         owned &= owned - 1) {
      Sys().close(word * kBits + std::countr_zero(owned));
    }
  }
}

}  // namespace

int OpenOwned(int directory, const char* path, int flags, mode_t mode) {
  const Section section;
  return Own(Sys().openat(directory, path, flags, mode));
}

int MemfdOwned(const char* name, unsigned flags) {
  const Section section;
  return Own(Sys().memfd_create(name, flags));
}

int FsOpenOwned(const char* type, unsigned flags) {
  const Section section;
  return Own(Sys().fsopen(type, flags));
}

int FsMountOwned(int fs, unsigned flags, unsigned attributes) {
  const Section section;
  return Own(Sys().fsmount(fs, flags, attributes));
}

int EventFdOwned() {
  const Section section;
  return Own(Sys().eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

int PidfdOwned(pid_t pid) {
  const Section section;
  return Own(Sys().pidfd_open(pid, 0));
}

int DuplicateOwned(int fd) {
  const Section section;
  return Own(Sys().fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

int SocketPairOwned(int type, int ends[2]) {
  const Section section;
  const int result = Sys().socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends);
  if (result != 0) return result;
  Own(ends[0]);
  Own(ends[1]);
  return 0;
}

ssize_t ReceiveOwned(int socket, msghdr* message) {
  const Section section;
  const ssize_t got = Sys().recvmsg(socket, message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) return got;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      Own(fd);
    }
  }
  return got;
}

bool MessageWaits(int socket) {
  msghdr message = {};
  char byte = 0;
  iovec part = {.iov_base = &byte, .iov_len = 1};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // Without room for them no fds are made.
  return Sys().recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT) > 0;
}

int InitRingOwned(unsigned entries, struct io_uring* ring, struct io_uring_params* params) {
  const Section section;
  const int result = Sys().uring_queue_init_params(entries, ring, params);
  if (result >= 0) Own(ring->ring_fd);
  return result;
}

void ExitRingOwned(struct io_uring* ring) {
  const Section section;
  Disown(ring->ring_fd);
  io_uring_queue_exit(ring);
}

void AdoptFd(int fd) { Own(fd); }

int CloseOwned(int fd) {
  const Section section;
  return Disown(fd) ? Sys().close(fd) : 0;
}

void BeginFork() {
  g_forks.fetch_add(1);
  AwaitZero(g_sections);
}

void EndForkInParent() { g_forks.fetch_sub(1); }

void EndForkInChild(bool keep) {
  g_forks.store(0);
  g_sections.store(0);
  if (keep) return;
  CloseAllOwned();
  // relaxed: the child has one thread.
  g_forks_that_closed.fetch_add(1, std::memory_order_relaxed);
}

uint32_t ForksThatClosed() { return g_forks_that_closed.load(std::memory_order_relaxed); }

}  // namespace holdfast::sys
