// The small pool of threads that looks at what was read, and the exchange of slots with the thread
// that reads.
#ifndef HOLDFAST_RUNTIME_LOAD_SINK_POOL_H_
#define HOLDFAST_RUNTIME_LOAD_SINK_POOL_H_

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "runtime/load/chunk_stream.h"

namespace holdfast::load {

/// Every slot is at any time either free, with the reader, or with the pool; so the queue here is
/// bounded by the number of slots.
class SinkPool {
 public:
  /// Up to `threads` threads, started by the first Push. None wanted, or none to be had: the sink
  /// runs in Push, in the caller.
  SinkPool(uint32_t threads, uint32_t slots, const StreamSink& sink);

  /// Finish().
  ~SinkPool();
  SinkPool(const SinkPool&) = delete;
  SinkPool& operator=(const SinkPool&) = delete;

  /// Takes a free slot; false when there is none now.
  bool TakeSlot(uint32_t* slot) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Readable after a slot became free, until Drain; -1 where the sink only runs in the caller. The
  /// reader waits for it beside its reads: a slot that is free while it sleeps is a read not in
  /// flight.
  int free_event() const { return free_event_.get(); }
  void DrainFreeEvent();

  /// Runs the sink here and now.
  void LookHere(uint32_t slot, const StreamBlock& block) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Hands a slot with its block over. It is free again when the sink has returned.
  void Push(uint32_t slot, const StreamBlock& block) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Waits until everything pushed was looked at, and ends the threads.
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
  static void* ThreadBody(void* pool);
  void Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  void Look(const StreamBlock& block);

  const uint32_t threads_wanted_;
  const StreamSink& sink_;
  // Both are only ever set, and what they guard is ordered by mutex_ or by the join.
  std::atomic<bool> stopped_{false};
  std::atomic<bool> keep_buffer_{false};
  base::Mutex mutex_;
  base::Condition changed_;
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<Work> work_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  base::UniqueFd free_event_;
  bool started_ = false;
  std::vector<pthread_t> threads_;
};

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_SINK_POOL_H_
