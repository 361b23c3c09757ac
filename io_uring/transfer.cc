// How a transfer goes on after each result.
#include "io_uring/transfer.h"

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

constexpr uint32_t kRefusalsUnslept = 4;
constexpr int64_t kRefusalSleepNs = 1'000'000;

constexpr uint32_t AlignDown(uint32_t bytes) { return bytes / kIoAlignment * kIoAlignment; }

}  // namespace

Next Transfer::Fail(int32_t number) {
  error = number;
  return Next::kFinished;
}

Next Transfer::Advance(int32_t result) {
  HOLDFAST_ASSERT(from <= done && done < request.bytes);
  HOLDFAST_ASSERT(error == 0);
  if (result == -EINTR || result == -EAGAIN) {
    if (++refusals > kRefusalsMax) return Fail(-result);
    if (refusals > kRefusalsUnslept) {
      const struct timespec pause = {.tv_sec = 0, .tv_nsec = kRefusalSleepNs};
      sys::Sys().nanosleep(&pause, nullptr);
    }
    return Next::kAgain;
  }
  const bool unaligned = from != AlignDown(from);
  if (result < 0) {
    // Direct I/O does not take an attempt from the middle of a block; it was made because the
    // aligned one before it got nowhere, and that is the failure.
    return Fail(unaligned && result == -EINVAL ? EIO : -result);
  }
  refusals = 0;
  const auto transferred = static_cast<uint32_t>(result);
  const uint32_t reached = from + (transferred < bytes() ? transferred : bytes());
  HOLDFAST_ASSERT(reached <= request.bytes);
  if (reached > done) {
    done = reached;
    if (done == request.bytes) return Next::kFinished;
    // The rest starts at a block boundary, as O_DIRECT asks; the bytes up to `done` are transferred
    // once more, the same ones, because the buffer is immutable until the completion.
    from = AlignDown(done);
    HOLDFAST_ASSERT(bytes() > 0);
    return Next::kAgain;
  }
  // No progress: for a read that is how the end of the file looks.
  if (request.opcode == Opcode::kRead) return Next::kFinished;
  // A limit in the middle of a block (RLIMIT_FSIZE, a quota) lets the repeated part through and
  // stops at the same byte; from exactly there, a buffered write gets the real error.
  if (from != done) {
    from = done;
    return Next::kAgain;
  }
  return Fail(EIO);
}

}  // namespace holdfast::io
