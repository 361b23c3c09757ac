// The requests of a queue. One request under way: bytes done, and the next attempt after each
// result.
//
// Shared by all engines, so that short transfers, interruptions and ends of files are decided in
// one place.
#ifndef HOLDFAST_IO_URING_TRANSFER_H_
#define HOLDFAST_IO_URING_TRANSFER_H_

#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::io {

inline constexpr uint32_t kDepthMax = 64;
inline constexpr uint32_t kWatchesMax = 4;
inline constexpr uint32_t kHeldFdsMax = 2;
inline constexpr uint32_t kPwriteThreadsMax = 16;

enum class Opcode : uint8_t { kWrite = 1, kRead = 2 };

/// One transfer. `buffer`, `offset` and `bytes` are multiples of kIoAlignment where the fd is
/// O_DIRECT.
struct Request {
  Opcode opcode = Opcode::kWrite;
  int fd = -1;
  void* buffer = nullptr;
  uint64_t offset = 0;
  uint32_t bytes = 0;
  uint64_t tag = 0;  ///< Copied to the completion.
};

/// The end of one transfer. The queue continues short transfers: `bytes` falls short of the request
/// only with an error, or where a read met the end of the file.
struct Completion {
  uint64_t tag = 0;
  uint32_t bytes = 0;
  int32_t error = 0;  ///< errno, 0 for success.
};

struct QueueOptions {
  /// kAuto takes the best rung; another value takes that rung or fails.
  EngineRung rung = EngineRung::kAuto;
  uint32_t depth = 8;      ///< Requests in flight, 1 to kDepthMax.
  uint32_t threads = 2;    ///< pwrite rung only; 0: synchronous, in the caller (forked children).
  void* region = nullptr;  ///< Memory of all buffers, for registration; may be null.
  size_t region_bytes = 0;
  bool may_register =
      false;  ///< kAuto tries the fixed rung only if set (huge pages, or a kept worker).
  /// Reserve places for `Hold`. A ring without such places is refused.
  bool holds_fds = false;
  /// ioprio value for each request, within this process's rights by ioprio_set(2); 0 is the
  /// process's own. The synchronous pwrite rung keeps the caller's priority.
  uint16_t io_priority = 0;
};

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

  /// Makes the next attempt by pread(2) or pwrite(2). Returns io_uring's result: bytes or -errno.
  int32_t Attempt() const;

  /// Processes the result of an attempt (bytes or -errno). kAgain: start another attempt.
  Next Advance(int32_t result);

  Completion End() const { return {.tag = request.tag, .bytes = done, .error = error}; }

 private:
  Next Fail(int32_t number);
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_TRANSFER_H_
