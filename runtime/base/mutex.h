// An annotated wrapper over std::mutex for clang's thread-safety analysis and TSan. Debian's
// absl::Mutex is not instrumented and gives false races.
#ifndef HOLDFAST_RUNTIME_BASE_MUTEX_H_
#define HOLDFAST_RUNTIME_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
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
class Condition {
 public:
  void NotifyAll() { condition_.notify_all(); }

  /// Returns false when `deadline` has passed. `mutex` is held before and after.
  bool WaitUntil(Mutex* mutex, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    // Bounded steps: an infinite deadline must not overflow the clock's arithmetic.
    const absl::Duration left = deadline - base::Now();
    const absl::Duration step = left < absl::Hours(1) ? left : absl::Hours(1);
    bool in_time = step > absl::ZeroDuration();
    if (in_time) {
      condition_.wait_for(lock, absl::ToChronoNanoseconds(step));
      in_time = base::Now() < deadline;
    }
    lock.release();
    return in_time;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_MUTEX_H_
