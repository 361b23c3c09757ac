// Threads for the last steps of saves: file system calls, notices to other ranks, and the release
// of workers. Each step may block, and must not keep other saves from ending.
#ifndef HOLDFAST_RUNTIME_WRITER_ENDINGS_H_
#define HOLDFAST_RUNTIME_WRITER_ENDINGS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"

namespace holdfast::writer {

/// \threadsafety Run is for one thread at a time.
class Endings {
 public:
  Endings() = default;
  ~Endings();  // finishes the queued tasks
  Endings(const Endings&) = delete;
  Endings& operator=(const Endings&) = delete;

  /// Runs `task` on a thread, a new one while every other is at work. Tasks beyond kThreadsMax
  /// wait. Where no thread can be started the caller runs the task.
  void Run(std::function<void()> task);

 private:
  static constexpr uint32_t kThreadsMax = 32;
  void Work();

  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  uint32_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<base::Thread>> threads_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_ENDINGS_H_
