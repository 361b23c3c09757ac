// The engine on io_uring, with or without registered buffers.
#ifndef HOLDFAST_IO_URING_URING_ENGINE_H_
#define HOLDFAST_IO_URING_URING_ENGINE_H_

#include <liburing.h>
#include <sys/uio.h>

#include <cstdint>

#include "io_uring/slots.h"
#include "io_uring/text.h"
#include "io_uring/transfer.h"

namespace holdfast::io {

/// A registered buffer is at most 1 GiB (io_uring_register(2)), so the region is a table of those.
inline constexpr uint64_t kRegisteredBufferBytes = 1ull << 30;

class UringEngine {
 public:
  /// Makes a ring and tests one round trip. Returns 0 or an errno with the reason in `why`.
  int Open(const QueueOptions& options, Text* why);

  /// Registers the region's memory. On failure (an errno) the ring is as usable as before.
  int Register(void* region, size_t region_bytes, Text* why);

  int Watch(uint32_t index, int fd);
  int Hold(uint32_t index, int fd);
  bool CanSubmit() const { return broken_ == 0 && !slots_.full(); }
  int Submit(const Request& request);
  int Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups);
  uint32_t in_flight() const { return slots_.in_flight(); }
  bool broken() const { return broken_ != 0; }
  void Describe(Text* text) const;
  /// False: some transfers did not end in time.
  bool Close();

 private:
  struct Watched {
    int fd = -1;
    bool armed = false;
    uint32_t generation = 0;
  };

  int Setup(uint32_t entries);
  int MakeHeldFds();
  void Exit();
  int Prove();
  void Prepare(uint32_t index);
  struct io_uring_sqe* TakeWatchEntry();
  void ArmWatches();
  bool Idle() const;
  int Flush();
  int Reap(Completion* out, int capacity, uint32_t* wakeups);
  bool Finish(uint32_t index, int32_t result, Completion* out);
  int Sleep(uint64_t deadline_ns);
  uint32_t UnconsumedTransfers() const;

  static constexpr uint32_t kBuffersMax = 1024;

  struct io_uring ring_ = {};
  Slots slots_;
  Watched watches_[kWatchesMax] = {};
  uint16_t io_priority_ = 0;
  bool closing_ = false;
  bool proved_ = false;
  int broken_ = 0;            // errno that ended all submission
  uintptr_t registered_ = 0;  // first byte of the registered region
  uint64_t registered_bytes_ = 0;
  uint32_t refused_ = 0;  // submissions refused with EINTR, EAGAIN or EBUSY
  struct iovec buffers_[kBuffersMax];
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_URING_ENGINE_H_
