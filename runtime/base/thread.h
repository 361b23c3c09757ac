// A thread of the library inside the host. The thread takes no signals, and a failed start is an
// error, not an exception as with std::thread. Where `operator new` finds no memory, the thread
// waits for memory up to 30 s: the first start installs a new handler, which calls the host's
// handler in the host's threads.
#ifndef HOLDFAST_RUNTIME_BASE_THREAD_H_
#define HOLDFAST_RUNTIME_BASE_THREAD_H_

#include <pthread.h>

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace holdfast::base {

class Thread {
 public:
  Thread() = default;
  ~Thread() { Join(); }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  /// Starts a thread that runs `body`, once.
  /// \error kResourceExhausted: a limit on threads, or no memory.
  absl::Status Start(std::function<void()> body);

  /// Waits for the end of a started `body`.
  void Join();

  /// Leaves a started thread to end by itself. The last act of a `body` that nobody waits for.
  void Detach();

  /// In a forked child: the thread is the parent's.
  void Forget() { started_ = false; }

 private:
  pthread_t thread_{};
  bool started_ = false;
};

/// Returns the number of threads for work that memory bounds, where the caller leaves the choice.
uint32_t DefaultThreads();

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_THREAD_H_
