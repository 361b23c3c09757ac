// The next step of a transfer after each result.
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

int32_t Transfer::Attempt() const {
  const auto at = static_cast<off_t>(offset());
  // At most the largest result; the rest is a short transfer.
  constexpr uint32_t kBytesMax = 1u << 30;
  const size_t count = bytes() < kBytesMax ? bytes() : kBytesMax;
  HOLDFAST_ASSERT(request.fd >= 0 && count > 0 && at >= 0);
  const ssize_t result = request.opcode == Opcode::kWrite
                             ? sys::Sys().pwrite(request.fd, buffer(), count, at)
                             : sys::Sys().pread(request.fd, buffer(), count, at);
  return result < 0 ? -errno : static_cast<int32_t>(result);
}

Next Transfer::Advance(int32_t result) {
  HOLDFAST_ASSERT(from <= done && done < request.bytes);
  HOLDFAST_ASSERT(error == 0);
  HOLDFAST_ASSERT(from == AlignDown(from) || from == done);
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
    // Direct I/O refuses an attempt from the middle of a block. The aligned attempt before made no
    // progress, and that is the failure.
    return Fail(unaligned && result == -EINVAL ? EIO : -result);
  }
  refusals = 0;
  const auto transferred = static_cast<uint32_t>(result);
  const uint32_t reached = from + (transferred < bytes() ? transferred : bytes());
  HOLDFAST_ASSERT(reached <= request.bytes);
  if (reached > done) {
    done = reached;
    if (done == request.bytes) return Next::kFinished;
    // The rest starts at a block boundary, for O_DIRECT. The bytes up to `done` are transferred
    // again; the immutable buffer makes them equal.
    from = AlignDown(done);
    HOLDFAST_ASSERT(bytes() > 0);
    return Next::kAgain;
  }
  // No progress: a read is at the end of the file.
  if (request.opcode == Opcode::kRead) return Next::kFinished;
  // A limit in the middle of a block (RLIMIT_FSIZE, a quota) admits the repeated part and stops at
  // the same byte. A buffered write from exactly there gets the real error.
  if (from != done) {
    from = done;
    return Next::kAgain;
  }
  return Fail(EIO);
}

}  // namespace holdfast::io
