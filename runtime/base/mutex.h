// An annotated wrapper over std::mutex for clang's thread-safety analysis and TSan. Debian's
// absl::Mutex is not instrumented and gives false races.
#ifndef HOLDFAST_RUNTIME_BASE_MUTEX_H_
#define HOLDFAST_RUNTIME_BASE_MUTEX_H_

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "runtime/base/clock.h"

namespace holdfast::base {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* mutex_;
};

/// Callers wait in a loop over a condition, always with a deadline.
///
/// In a program for a C library before 2.30 std::condition_variable waits by the clock of the day.
class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~Condition() { pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void NotifyAll() { pthread_cond_broadcast(&condition_); }

  /// Returns false when `deadline` has passed. `mutex` is held before and after.
  bool WaitUntil(Mutex* mutex, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    // Bounded steps: an infinite deadline must not overflow the clock's arithmetic.
    const absl::Duration left = deadline - base::Now();
    const absl::Duration step = left < absl::Hours(1) ? left : absl::Hours(1);
    if (step <= absl::ZeroDuration()) return false;
    const auto until = std::chrono::steady_clock::now().time_since_epoch();
    const timespec end = absl::ToTimespec(absl::FromChrono(until) + step);
    pthread_cond_timedwait(&condition_, mutex->mutex_.native_handle(), &end);
    return base::Now() < deadline;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_MUTEX_H_
