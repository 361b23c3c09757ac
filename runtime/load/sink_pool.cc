#include "runtime/load/sink_pool.h"

#include <signal.h>

#include "absl/time/time.h"
#include "runtime/sys/system.h"

namespace holdfast::load {

SinkPool::SinkPool(uint32_t threads, uint32_t slots, const StreamSink& sink) : sink_(sink) {
  {
    base::MutexLock lock(&mutex_);
    for (uint32_t slot = slots; slot > 0; --slot) free_.push_back(slot - 1);
  }
  if (threads < 2) return;
  // The host's signals are handled by the host's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (uint32_t i = 0; i < threads; ++i) {
    pthread_t thread;
    if (sys::Sys().thread_create(&thread, nullptr, ThreadBody, this) != 0) break;
    threads_.push_back(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

SinkPool::~SinkPool() { Finish(); }

bool SinkPool::TakeSlot(uint32_t* slot) {
  base::MutexLock lock(&mutex_);
  if (free_.empty()) return false;
  *slot = free_.back();
  free_.pop_back();
  return true;
}

void SinkPool::WaitForSlot() {
  base::MutexLock lock(&mutex_);
  while (free_.empty()) changed_.WaitUntil(&mutex_, absl::InfiniteFuture());
}

void SinkPool::Push(uint32_t slot, const StreamBlock& block) {
  if (threads_.empty()) {
    Look(block);
    ReturnSlot(slot);
    return;
  }
  base::MutexLock lock(&mutex_);
  work_.push_back(Work{slot, block});
  changed_.NotifyAll();
}

void SinkPool::ReturnSlot(uint32_t slot) {
  base::MutexLock lock(&mutex_);
  free_.push_back(slot);
  changed_.NotifyAll();
}

void SinkPool::Finish() {
  {
    base::MutexLock lock(&mutex_);
    closing_ = true;
    changed_.NotifyAll();
  }
  for (pthread_t thread : threads_) pthread_join(thread, nullptr);
  threads_.clear();
}

void* SinkPool::ThreadBody(void* pool) {
  static_cast<SinkPool*>(pool)->Serve();
  return nullptr;
}

void SinkPool::Serve() {
  while (true) {
    Work work{};
    {
      base::MutexLock lock(&mutex_);
      while (work_.empty() && !closing_) changed_.WaitUntil(&mutex_, absl::InfiniteFuture());
      if (work_.empty()) return;
      work = work_.front();
      work_.pop_front();
    }
    Look(work.block);
    ReturnSlot(work.slot);
  }
}

void SinkPool::Look(const StreamBlock& block) {
  // After a stop nothing more is looked at: the caller has its answer.
  if (stopped()) return;
  const StreamVerdict verdict = sink_(block);
  if (verdict == StreamVerdict::kContinue) return;
  if (verdict == StreamVerdict::kKeepBuffer) keep_buffer_.store(true, std::memory_order_relaxed);
  stopped_.store(true, std::memory_order_relaxed);
}

}  // namespace holdfast::load
