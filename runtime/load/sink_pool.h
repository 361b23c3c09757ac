// The small pool of threads that run the sink, and the exchange of slots with the reading thread.
#ifndef HOLDFAST_RUNTIME_LOAD_SINK_POOL_H_
#define HOLDFAST_RUNTIME_LOAD_SINK_POOL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/base/unique_fd.h"
#include "runtime/load/chunk_stream.h"

namespace holdfast::load {

/// Every slot is free, with the reader, or with the pool. So the number of slots bounds the queue.
class SinkPool {
 public:
  /// Up to `threads` threads, started by the first Push. With no thread, wanted or available, the
  /// sink runs in Push, in the caller.
  SinkPool(uint32_t threads, uint32_t slots, const StreamSink& sink);

  /// Calls Finish().
  ~SinkPool();
  SinkPool(const SinkPool&) = delete;
  SinkPool& operator=(const SinkPool&) = delete;

  /// Takes a free slot. Returns false when no slot is free.
  bool TakeSlot(uint32_t* slot) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Readable after a slot became free, until Drain; -1 where the sink only runs in the caller. The
  /// reader waits for the event beside its reads, so that a free slot does not stay idle.
  int free_event() const { return free_event_.get(); }
  void DrainFreeEvent();

  /// Runs the sink in the calling thread.
  void LookHere(uint32_t slot, const StreamBlock& block) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Passes a slot with its block to the pool. The slot is free again after the sink's return.
  void Push(uint32_t slot, const StreamBlock& block) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Waits until the sink has seen every pushed block, and ends the threads.
  void Finish() ABSL_LOCKS_EXCLUDED(mutex_);

  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  bool keep_buffer() const { return keep_buffer_.load(std::memory_order_relaxed); }

 private:
  struct Work {
    uint32_t slot;
    StreamBlock block;
  };
  void Start();
  void ReturnSlot(uint32_t slot) ABSL_LOCKS_EXCLUDED(mutex_);
  void Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  void Look(const StreamBlock& block);

  const uint32_t threads_wanted_;
  const StreamSink& sink_;
  // Both flags are only ever set; mutex_ or the join orders the data that they guard.
  std::atomic<bool> stopped_{false};
  std::atomic<bool> keep_buffer_{false};
  base::Mutex mutex_;
  base::Condition changed_;
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<Work> work_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  base::UniqueFd free_event_;
  bool started_ = false;
  std::vector<std::unique_ptr<base::Thread>> threads_;
};

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_SINK_POOL_H_
