// The registry of owned fds that foreign children close. A fixed table of atomics: the child
// handler runs in a process whose other threads are gone, so it must not take a lock that one of
// them may have held.
#include "runtime/base/unique_fd.h"

#include <pthread.h>

#include <atomic>

#include "runtime/base/check.h"
#include "runtime/sys/system.h"

namespace holdfast::base {
namespace {

// fds above this are left to close-on-exec alone. 4096 covers several hundred saves in flight.
constexpr int kTracked = 4096;
std::atomic<bool> g_owned[kTracked];
std::atomic<unsigned> g_generation{1};
thread_local int t_own_forks = 0;

void InChild() {
  // relaxed: the child has one thread.
  g_generation.fetch_add(1, std::memory_order_relaxed);
  if (t_own_forks > 0) return;
  for (int fd = 0; fd < kTracked; ++fd) {
    if (g_owned[fd].exchange(false, std::memory_order_relaxed)) sys::Sys().close(fd);
  }
}

void RegisterOnce() {
  static const int registered = pthread_atfork(nullptr, nullptr, InChild);
  HOLDFAST_CHECK(registered == 0,
                 "without the fork handler children would keep locks and memory alive");
}

}  // namespace

UniqueFd::UniqueFd(int fd) : fd_(fd) {
  RegisterOnce();
  if (fd >= 0 && fd < kTracked) g_owned[fd].store(true, std::memory_order_relaxed);
}

void UniqueFd::Reset() {
  if (fd_ < 0) return;
  // In a child the handler has closed it already and the number may be somebody else's by now.
  const bool owned = fd_ >= kTracked || g_owned[fd_].exchange(false, std::memory_order_relaxed);
  if (owned) sys::Sys().close(fd_);
  fd_ = -1;
}

ForkScope::ForkScope() { ++t_own_forks; }
ForkScope::~ForkScope() { --t_own_forks; }

ForkGuard::ForkGuard() : generation_(Generation()) { RegisterOnce(); }

unsigned ForkGuard::Generation() { return g_generation.load(std::memory_order_relaxed); }

}  // namespace holdfast::base
