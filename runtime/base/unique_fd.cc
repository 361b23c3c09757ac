// The handlers that close owned fds in foreign children. The table is below the fork line, in
// runtime/sys/owned_fds.h.
#include "runtime/base/unique_fd.h"

#include <pthread.h>

#include <atomic>

#include "runtime/base/check.h"

namespace holdfast::base {
namespace {

std::atomic<unsigned> g_generation{1};
thread_local int t_own_forks = 0;

void InChild() {
  // relaxed: the child has one thread.
  g_generation.fetch_add(1, std::memory_order_relaxed);
  sys::EndForkInChild(t_own_forks > 0);
}

// Installed before the first fd is made, so that no fork falls between.
[[maybe_unused]] const bool g_registered = [] {
  HOLDFAST_CHECK(pthread_atfork(sys::BeginFork, sys::EndForkInParent, InChild) == 0,
                 "without the fork handlers children would keep locks and memory alive");
  return true;
}();

}  // namespace

void UniqueFd::Reset() {
  if (fd_ < 0) return;
  if (forks_ == sys::ForksThatClosed()) sys::CloseOwned(fd_);
  fd_ = -1;
}

ForkScope::ForkScope() { ++t_own_forks; }
ForkScope::~ForkScope() { --t_own_forks; }

ForkGuard::ForkGuard() : generation_(Generation()) {}

unsigned ForkGuard::Generation() { return g_generation.load(std::memory_order_relaxed); }

}  // namespace holdfast::base
