// The handler by which foreign children close what is owned; the table itself is below the fork
// line, see runtime/sys/owned_fds.h.
#include "runtime/base/unique_fd.h"

#include <pthread.h>

#include <atomic>

#include "runtime/base/check.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::base {
namespace {

std::atomic<unsigned> g_generation{1};
thread_local int t_own_forks = 0;

void InChild() {
  // relaxed: the child has one thread.
  g_generation.fetch_add(1, std::memory_order_relaxed);
  if (t_own_forks > 0) return;
  sys::CloseOwnedFds();
}

void RegisterOnce() {
  static const int registered = pthread_atfork(nullptr, nullptr, InChild);
  HOLDFAST_CHECK(registered == 0,
                 "without the fork handler children would keep locks and memory alive");
}

}  // namespace

UniqueFd::UniqueFd(int fd) : fd_(fd) {
  RegisterOnce();
  sys::OwnFd(fd);
}

void UniqueFd::Reset() {
  if (fd_ < 0) return;
  // In a child the handler has closed it already and the number may be somebody else's by now.
  if (sys::DisownFd(fd_)) sys::Sys().close(fd_);
  fd_ = -1;
}

ForkScope::ForkScope() { ++t_own_forks; }
ForkScope::~ForkScope() { --t_own_forks; }

ForkGuard::ForkGuard() : generation_(Generation()) { RegisterOnce(); }

unsigned ForkGuard::Generation() { return g_generation.load(std::memory_order_relaxed); }

}  // namespace holdfast::base
