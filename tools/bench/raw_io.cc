// The one file of the bench that looks behind the public interface: it drives the engines alone.
#include "tools/bench/raw_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "io_uring/queue.h"
#include "runtime/sys/owned_fds.h"
#include "tools/bench/clock.h"
#include "tools/bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kDepth = 8;    // As in CheckpointerOptions.
constexpr uint32_t kThreads = 2;  // Of the pwrite rung, likewise.
constexpr int kWaitMs = 30'000;
constexpr mode_t kFileMode = 0600;

absl::Status Error(const RawRequest& request, const char* what, int error) {
  return absl::UnavailableError(absl::StrCat(what, " ", request.name, ": ", std::strerror(error)));
}

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() { sys::CloseOwned(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

/// Keeps kDepth transfers in flight until all of the file was transferred.
absl::Status Transfer(io::Queue* queue, io::Opcode opcode, int fd, char* buffers,
                      const RawRequest& request) {
  uint64_t next = 0;
  uint64_t done = 0;
  uint32_t free_buffers = (1u << kDepth) - 1;
  while (done < request.bytes) {
    while (next < request.bytes && free_buffers != 0 && queue->CanSubmit()) {
      const auto slot = static_cast<uint32_t>(std::countr_zero(free_buffers));
      const auto bytes =
          static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, request.bytes - next));
      const int error = queue->Submit({.opcode = opcode,
                                       .fd = fd,
                                       .buffer = buffers + uint64_t{slot} * kChunkBytes,
                                       .offset = next,
                                       .bytes = bytes,
                                       .tag = slot});
      if (error != 0) return Error(request, "submit for", error);
      free_buffers &= ~(1u << slot);
      next += bytes;
    }
    io::Completion completions[kDepth];
    const int count = queue->Wait(completions, kDepth, kWaitMs, nullptr);
    if (count < 0) return Error(request, "wait for", -count);
    if (count == 0) return Error(request, "wait for", ETIME);
    for (int i = 0; i < count; ++i) {
      if (completions[i].error != 0) return Error(request, "transfer", completions[i].error);
      done += completions[i].bytes;
      free_buffers |= 1u << completions[i].tag;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<RawResult> Run(const RawRequest& request, io::Opcode opcode) {
  const bool write = opcode == io::Opcode::kWrite;
  io::DirectOpen opened;
  int error =
      io::OpenDirect(request.directory, request.name.c_str(),
                     write ? O_CREAT | O_EXCL | O_WRONLY : O_RDONLY, kFileMode, true, &opened);
  if (error != 0) return Error(request, "open", error);
  const File file(opened.fd);
  // A file system that cannot reserve is measured without.
  if (write) (void)!fallocate(file.fd(), 0, 0, static_cast<off_t>(request.bytes));
  const absl::StatusOr<Memory> buffers = Memory::Make(uint64_t{kDepth} * kChunkBytes, Pages::kHuge);
  if (!buffers.ok()) return buffers.status();
  FillWithNoise(*buffers);
  // After the memory, so that it is closed first.
  const auto queue = std::make_unique<io::Queue>();
  error = queue->Open({.rung = request.engine,
                       .depth = kDepth,
                       .threads = kThreads,
                       .region = buffers->data(),
                       .region_bytes = buffers->bytes(),
                       .may_register = true});
  if (error != 0) return absl::UnavailableError(queue->reason());

  const Stopwatch watch;
  const absl::Status status = Transfer(queue.get(), opcode, file.fd(), buffers->data(), request);
  if (!status.ok()) return status;
  if (write && fsync(file.fd()) != 0) return Error(request, "fsync", errno);
  return RawResult{.seconds = watch.seconds(), .cpu_seconds = watch.cpu_seconds()};
}

}  // namespace

absl::StatusOr<RawResult> RawWrite(const RawRequest& request) {
  return Run(request, io::Opcode::kWrite);
}

absl::StatusOr<RawResult> RawRead(const RawRequest& request) {
  return Run(request, io::Opcode::kRead);
}

absl::StatusOr<RawResult> BufferedWrite(const RawRequest& request) {
  const absl::StatusOr<Memory> buffer = Memory::Make(kChunkBytes, Pages::kHuge);
  if (!buffer.ok()) return buffer.status();
  FillWithNoise(*buffer);
  const File file(sys::OpenOwned(request.directory, request.name.c_str(),
                                 O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, kFileMode));
  if (file.fd() < 0) return Error(request, "open", errno);
  const Stopwatch watch;
  for (uint64_t done = 0; done < request.bytes;) {
    const uint64_t bytes = std::min<uint64_t>(kChunkBytes, request.bytes - done);
    const ssize_t wrote = ::write(file.fd(), buffer->data(), bytes);
    if (wrote <= 0) return Error(request, "write", errno);
    done += static_cast<uint64_t>(wrote);
  }
  if (fsync(file.fd()) != 0) return Error(request, "fsync", errno);
  return RawResult{.seconds = watch.seconds(), .cpu_seconds = watch.cpu_seconds()};
}

}  // namespace holdfast::bench
