// A file descriptor that closes itself, here and in foreign children.
#ifndef HOLDFAST_RUNTIME_BASE_UNIQUE_FD_H_
#define HOLDFAST_RUNTIME_BASE_UNIQUE_FD_H_

#include <utility>

namespace holdfast::base {

/// Owns an fd that a call of runtime/sys/owned_fds.h has made. While it is owned, an atfork child
/// handler closes the child's copy of it, so that a DataLoader's forked workers keep neither the
/// arena, nor a socket, nor a lock alive. (The fork launcher keeps what it needs by dup'ing it in
/// the child before: see ForkScope.)
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int owned) : fd_(owned) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Reset();

 private:
  int fd_ = -1;
};

/// While one is alive on this thread, a fork() by this thread is Holdfast's own: the child keeps
/// its fds.
class ForkScope {
 public:
  ForkScope();
  ~ForkScope();
};

/// Tells whether this process is still the one that made the object holding it. A child of fork()
/// sees false.
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
