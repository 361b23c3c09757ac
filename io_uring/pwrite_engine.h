// The engine on pread(2) and pwrite(2), with its own threads, or synchronous in the caller.
#ifndef HOLDFAST_IO_URING_PWRITE_ENGINE_H_
#define HOLDFAST_IO_URING_PWRITE_ENGINE_H_

#include <pthread.h>

#include <cstdint>

#include "io_uring/slots.h"
#include "io_uring/text.h"
#include "io_uring/transfer.h"
#include "runtime/sys/assert.h"

namespace holdfast::io {

class PwriteEngine {
 public:
  /// Starts up to `options.threads` threads, as many as the system allows; without threads Submit
  /// does the transfers. Returns 0 or an errno; `why` names the reason.
  int Open(const QueueOptions& options, Text* why);

  int Watch(uint32_t index, int fd);
  bool CanSubmit() const;
  int Submit(const Request& request);
  int Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups);
  uint32_t in_flight() const;
  void Describe(Text* text) const;
  void Close();

 private:
  // Indices of slots, first in first out, at most one per slot.
  struct Fifo {
    uint8_t entries[kDepthMax] = {};
    uint32_t first = 0;
    uint32_t count = 0;
    void Push(uint32_t index) {
      HOLDFAST_ASSERT(count < kDepthMax && index < kDepthMax);
      entries[(first + count++) % kDepthMax] = static_cast<uint8_t>(index);
    }
    uint32_t Pop() {
      HOLDFAST_ASSERT(count > 0);
      const uint32_t index = entries[first];
      first = (first + 1) % kDepthMax;
      --count;
      return index;
    }
  };

  static void* ThreadMain(void* engine);
  void ServeQueue();
  int StartThreads(uint32_t wanted);
  int Collect(Completion* out, int capacity);
  int Poll(int timeout_ms, uint32_t* wakeups);

  Slots slots_;        // guarded by mutex_, except a transfer that a thread has popped from queued_
  Fifo queued_;        // guarded by mutex_
  Fifo done_;          // guarded by mutex_
  bool stop_ = false;  // guarded by mutex_
  mutable pthread_mutex_t mutex_;
  pthread_cond_t work_;
  pthread_t threads_[kPwriteThreadsMax];
  uint32_t thread_count_ = 0;
  uint16_t io_priority_ = 0;
  const sys::LastWords* last_words_ = nullptr;  // of the thread that called Open
  int done_fd_ = -1;                            // eventfd: signals a push to done_
  int watched_[kWatchesMax] = {-1, -1, -1, -1};
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_PWRITE_ENGINE_H_
