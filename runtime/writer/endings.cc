#include "runtime/writer/endings.h"

#include <utility>

#include "absl/time/time.h"
#include "runtime/base/clock.h"

namespace holdfast::writer {

Endings::~Endings() {
  {
    const base::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  for (const auto& thread : threads_) thread->Join();
}

void Endings::Run(std::function<void()> task) {
  bool has_thread = false;
  {
    const base::MutexLock lock(&mutex_);
    has_thread = tasks_.size() < idle_;
  }
  if (!has_thread && threads_.size() < kThreadsMax) {
    auto thread = std::make_unique<base::Thread>();
    if (thread->Start([this] { Work(); }).ok()) threads_.push_back(std::move(thread));
  }
  if (threads_.empty()) return task();
  const base::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  changed_.NotifyAll();
}

void Endings::Work() {
  while (true) {
    std::function<void()> task;
    {
      const base::MutexLock lock(&mutex_);
      ++idle_;
      while (tasks_.empty() && !stopping_)
        changed_.WaitUntil(&mutex_, base::Now() + absl::Hours(1));
      --idle_;
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace holdfast::writer
