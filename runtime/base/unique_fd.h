// A file descriptor that closes itself, also in foreign children.
#ifndef HOLDFAST_RUNTIME_BASE_UNIQUE_FD_H_
#define HOLDFAST_RUNTIME_BASE_UNIQUE_FD_H_

#include <cstdint>
#include <utility>

#include "runtime/sys/owned_fds.h"

namespace holdfast::base {

/// Owns an fd made by a call of runtime/sys/owned_fds.h. An atfork child handler closes the child's
/// copy, so that a DataLoader's forked workers keep no arena, socket or lock alive; Reset() then
/// closes nothing, because the child may have reused the number. The fork launcher duplicates its
/// fds in the child before (see ForkScope).
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int owned) : fd_(owned), forks_(sys::ForksThatClosed()) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
      forks_ = other.forks_;
    }
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Reset();

 private:
  int fd_ = -1;
  uint32_t forks_ = 0;  // when the fd was made
};

/// Marks fork() calls of this thread as Holdfast's own during its lifetime: the child keeps its
/// fds.
class ForkScope {
 public:
  ForkScope();
  ~ForkScope();
};

/// Tells the process that made the enclosing object from its fork() children, which get false.
class ForkGuard {
 public:
  ForkGuard();
  bool InCreator() const { return generation_ == Generation(); }

 private:
  static unsigned Generation();
  unsigned generation_;
};

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_UNIQUE_FD_H_
