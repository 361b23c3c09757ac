#include "runtime/load/sink_pool.h"

#include <utility>

#include "absl/time/time.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::load {

SinkPool::SinkPool(uint32_t threads, uint32_t slots, const StreamSink& sink)
    : threads_wanted_(threads), sink_(sink) {
  base::MutexLock lock(&mutex_);
  for (uint32_t slot = slots; slot > 0; --slot) free_.push_back(slot - 1);
  if (threads > 0) {
    free_event_ = base::UniqueFd(sys::EventFdOwned());
  }
}

void SinkPool::Start() {
  started_ = true;
  if (!free_event_.valid()) return;
  while (threads_.size() < threads_wanted_) {
    auto thread = std::make_unique<base::Thread>();
    if (!thread->Start([this] { Serve(); }).ok()) return;
    threads_.push_back(std::move(thread));
  }
}

SinkPool::~SinkPool() { Finish(); }

bool SinkPool::TakeSlot(uint32_t* slot) {
  base::MutexLock lock(&mutex_);
  if (free_.empty()) return false;
  *slot = free_.back();
  free_.pop_back();
  return true;
}

void SinkPool::DrainFreeEvent() {
  uint64_t count = 0;
  // An empty event was drained already.
  (void)sys::Sys().read(free_event_.get(), &count, sizeof(count));
}

void SinkPool::LookHere(uint32_t slot, const StreamBlock& block) {
  Look(block);
  ReturnSlot(slot);
}

void SinkPool::Push(uint32_t slot, const StreamBlock& block) {
  if (!started_) Start();
  if (threads_.empty()) {
    LookHere(slot, block);
    return;
  }
  base::MutexLock lock(&mutex_);
  work_.push_back(Work{slot, block});
  changed_.NotifyAll();
}

void SinkPool::ReturnSlot(uint32_t slot) {
  base::MutexLock lock(&mutex_);
  free_.push_back(slot);
}

void SinkPool::Finish() {
  {
    base::MutexLock lock(&mutex_);
    closing_ = true;
    changed_.NotifyAll();
  }
  threads_.clear();  // joins
  free_event_.Reset();
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
    LookHere(work.slot, work.block);
    const uint64_t one = 1;
    // The counter cannot overflow: that takes 2^64 - 1 slots.
    (void)sys::Sys().write(free_event_.get(), &one, sizeof(one));
  }
}

void SinkPool::Look(const StreamBlock& block) {
  // After a stop the sink sees no further block: the caller has its result.
  if (stopped()) return;
  const StreamVerdict verdict = sink_(block);
  if (verdict == StreamVerdict::kContinue) return;
  if (verdict == StreamVerdict::kKeepBuffer) keep_buffer_.store(true, std::memory_order_relaxed);
  stopped_.store(true, std::memory_order_relaxed);
}

}  // namespace holdfast::load
