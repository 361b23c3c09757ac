// One request under way: bytes done, and the next attempt after each result.
//
// Shared by all engines, so that short transfers, interruptions and ends of files are decided in
// one place.
#ifndef HOLDFAST_IO_URING_TRANSFER_H_
#define HOLDFAST_IO_URING_TRANSFER_H_

#include <cstdint>

#include "io_uring/queue.h"

namespace holdfast::io {

enum class Next : uint8_t { kFinished, kAgain };

/// Consecutive EINTR or EAGAIN results of one transfer before it fails; from the fifth on with a
/// millisecond between attempts.
inline constexpr uint32_t kRefusalsMax = 100;

struct Transfer {
  Request request;
  uint32_t done = 0;  ///< Bytes transferred from the beginning.
  uint32_t from = 0;  ///< Begin of the running attempt; at most `done`.
  uint32_t refusals = 0;
  int32_t error = 0;
  uint64_t started_ns = 0;

  /// Returns the range of the next attempt.
  void* buffer() const { return static_cast<char*>(request.buffer) + from; }
  uint64_t offset() const { return request.offset + from; }
  uint32_t bytes() const { return request.bytes - from; }

  /// Processes the result of an attempt (bytes or -errno). kAgain: start another attempt.
  Next Advance(int32_t result);

  Completion End() const { return {.tag = request.tag, .bytes = done, .error = error}; }

 private:
  Next Fail(int32_t number);
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_TRANSFER_H_
