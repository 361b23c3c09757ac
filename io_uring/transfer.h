// One request on its way: what is done, and what each result of an attempt means for what follows.
//
// The same on every engine, so that short transfers, interruptions and ends of files are decided in
// one place.
#ifndef HOLDFAST_IO_URING_TRANSFER_H_
#define HOLDFAST_IO_URING_TRANSFER_H_

#include <cstdint>

#include "io_uring/queue.h"

namespace holdfast::io {

enum class Next : uint8_t { kFinished, kAgain };

/// Attempts of one transfer that may be refused with EINTR or EAGAIN in a row; from the fifth on
/// with a millisecond between them.
inline constexpr uint32_t kRefusalsMax = 100;

struct Transfer {
  Request request;
  uint32_t done = 0;  ///< Bytes from the beginning that are known to be transferred.
  uint32_t from = 0;  ///< Where the running attempt begins; at most `done`.
  uint32_t refusals = 0;
  int32_t error = 0;
  uint64_t started_ns = 0;

  /// What the next attempt transfers.
  void* buffer() const { return static_cast<char*>(request.buffer) + from; }
  uint64_t offset() const { return request.offset + from; }
  uint32_t bytes() const { return request.bytes - from; }

  /// Takes the result of an attempt (bytes or -errno). kAgain: start another one.
  Next Advance(int32_t result);

  Completion End() const { return {.tag = request.tag, .bytes = done, .error = error}; }

 private:
  Next Fail(int32_t number);
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_TRANSFER_H_
