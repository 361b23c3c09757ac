#include "runtime/doctor/speed_probe.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/digest/digest.h"
#include "runtime/sys/system.h"

namespace holdfast::doctor {
namespace {

constexpr uint64_t kFileBytesMax = uint64_t{2} << 30;
constexpr int kWaitMs = 30'000;
constexpr char kSpeedFile[] = "speed";

double Seconds(uint64_t since_ns) { return static_cast<double>(sys::NowNs() - since_ns) * 1e-9; }

/// Keeps chunks in flight until the time or the file ends.
absl::Status WriteChunks(int fd, io::Queue* queue, const staging::Arena& arena, uint64_t bytes_max,
                         double seconds, uint64_t* bytes_written) {
  const uint64_t chunks_in_arena = arena.bytes() / kChunkBytes;
  const uint64_t begin = sys::NowNs();
  uint64_t offset = 0;
  io::Completion completions[io::kDepthMax];
  while (true) {
    while (queue->CanSubmit() && offset + kChunkBytes <= bytes_max && Seconds(begin) < seconds) {
      const int failed = queue->Submit(
          {.opcode = io::Opcode::kWrite,
           .fd = fd,
           .buffer = arena.base() + offset / kChunkBytes % chunks_in_arena * kChunkBytes,
           .offset = offset,
           .bytes = kChunkBytes,
           .tag = offset});
      if (failed == EAGAIN) break;
      if (failed != 0) return base::ErrnoStatus("write", kSpeedFile, failed);
      offset += kChunkBytes;
    }
    if (queue->in_flight() == 0) return absl::OkStatus();
    uint32_t wakeups = 0;
    const int count = queue->Wait(completions, io::kDepthMax, kWaitMs, &wakeups);
    if (count < 0) return base::ErrnoStatus("write", kSpeedFile, -count);
    if (count == 0) {
      return absl::DeadlineExceededError("write speed: no write has ended for 30 seconds");
    }
    for (int i = 0; i < count; ++i) {
      if (completions[i].error != 0) {
        return base::ErrnoStatus("write", absl::StrCat(kSpeedFile, " @ ", completions[i].tag),
                                 completions[i].error);
      }
      *bytes_written += completions[i].bytes;
    }
  }
}

absl::Status MeasureWriting(int scratch, io::Queue* queue, const staging::Arena& arena,
                            double seconds, ProbeReport* report) {
  const uint64_t bytes_max = std::min(kFileBytesMax, report->free_bytes / 4);
  if (bytes_max < kChunkBytes) return absl::OkStatus();
  io::DirectOpen opened;
  const int failed =
      io::OpenDirect(scratch, kSpeedFile, O_CREAT | O_EXCL | O_RDWR, 0600, true, &opened);
  if (failed != 0) return base::ErrnoStatus("make", kSpeedFile, failed);
  const base::UniqueFd fd(opened.fd);
  const absl::Cleanup removed = [scratch] { sys::Sys().unlinkat(scratch, kSpeedFile, 0); };
  // A file system without reservation is measured without it.
  sys::Sys().fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes_max));
  const uint64_t begin = sys::NowNs();
  uint64_t bytes_written = 0;
  HOLDFAST_RETURN_IF_ERROR(WriteChunks(fd.get(), queue, arena, bytes_max, seconds, &bytes_written));
  // Truncated before the fsync: the measurement must not include reserved, unused blocks.
  sys::Sys().ftruncate(fd.get(), static_cast<off_t>(bytes_written));
  if (sys::Sys().fsync(fd.get()) != 0) return base::ErrnoStatus("fsync", kSpeedFile, errno);
  report->write_bytes_per_second = static_cast<double>(bytes_written) / Seconds(begin);
  return absl::OkStatus();
}

/// Calls `step` with chunk after chunk of the arena. Returns bytes per second.
template <typename Step>
double Rate(const staging::Arena& arena, double seconds, const Step& step) {
  const uint64_t chunks = arena.bytes() / kChunkBytes;
  const uint64_t begin = sys::NowNs();
  uint64_t bytes = 0;
  for (uint64_t i = 0; i == 0 || Seconds(begin) < seconds; i = (i + 1) % chunks) {
    step(arena.base() + i * kChunkBytes, i * kChunkBytes);
    bytes += kChunkBytes;
  }
  return static_cast<double>(bytes) / Seconds(begin);
}

}  // namespace

absl::Status MeasureSpeeds(int scratch, io::Queue* queue, const staging::Arena& arena,
                           absl::Duration time, ProbeReport* report) {
  const double seconds = absl::ToDoubleSeconds(time);
  // The arena is larger than most caches, so both rates are of memory.
  const auto source = std::make_unique<char[]>(arena.bytes());
  std::fill_n(source.get(), arena.bytes(), '\x5a');
  report->copy_bytes_per_second = Rate(arena, seconds / 6, [&source](char* chunk, uint64_t at) {
    memcpy(chunk, &source[at], kChunkBytes);
  });
  // Stored in the report's memory, so the compiler cannot remove the work.
  volatile uint64_t sink = 0;
  report->digest_bytes_per_second = Rate(arena, seconds / 6, [&sink](char* chunk, uint64_t) {
    sink = digest::Of(chunk, kChunkBytes).low;
  });
  return MeasureWriting(scratch, queue, arena, seconds * 2 / 3, report);
}

}  // namespace holdfast::doctor
