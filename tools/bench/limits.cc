// The only file of the bench below the public interface: it drives the engines alone.
#include "tools/bench/limits.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "io_uring/queue.h"
#include "runtime/base/unique_fd.h"
#include "runtime/sys/owned_fds.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kDepth = 8;    // As in CheckpointerOptions.
constexpr uint32_t kThreads = 2;  // Of the pwrite rung, likewise.
constexpr int kWaitMs = 30'000;
constexpr mode_t kFileMode = 0600;

absl::Status Error(const LimitFile& file, const char* what, int error) {
  return absl::UnavailableError(absl::StrCat(what, " ", file.name, ": ", std::strerror(error)));
}

void NoteRate(const LimitFile& file, const Stopwatch& watch, Way* way) {
  const auto bytes = static_cast<double>(file.bytes);
  way->Note("rate", bytes / watch.seconds());
  way->Note("cpu", watch.cpu_seconds() / (bytes / kGib));
}

absl::StatusOr<std::string> Output(const std::string& command) {
  std::FILE* const pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) return absl::UnavailableError("start fio");
  std::string out;
  char buffer[4096];
  for (size_t got = 0; (got = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    out.append(buffer, got);
  }
  if (pclose(pipe) != 0) return absl::UnavailableError("fio failed or is not installed");
  return out;
}

/// Returns bytes per second of the whole job: fio counts its final fsync as run time.
absl::StatusOr<double> FioRate(const std::string& text, const char* direction) {
  const size_t begin = text.find('{');  // Notes may stand in front of the document.
  nlohmann::json json;
  if (begin != std::string::npos) json = nlohmann::json::parse(text.substr(begin), nullptr, false);
  const nlohmann::json::json_pointer at(std::string("/jobs/0/") + direction);
  if (json.is_discarded() || !json.contains(at)) {
    return absl::UnavailableError("fio's output is not understood");
  }
  const double milliseconds = json[at].value("runtime", 0.0);
  if (milliseconds <= 0) return absl::UnavailableError("fio measured no time");
  return json[at].value("io_bytes", 0.0) / milliseconds * 1e3;
}

absl::Status Fio(const Bench& bench, const LimitFile& file, const char* direction, const char* more,
                 Way* way) {
  const std::string path = absl::StrCat(bench.scratch.path(), "/", file.name);
  absl::Status status;
  // Where io_uring is forbidden, the next best.
  for (const char* engine :
       {"--ioengine=io_uring --fixedbufs=1 --registerfiles=1", "--ioengine=libaio"}) {
    const absl::StatusOr<std::string> text = Output(
        absl::StrCat("fio --name=raw --filename='", absl::StrReplaceAll(path, {{"'", "'\\''"}}),
                     "' --rw=", direction, " --size=", file.bytes,
                     " --bs=4m --iodepth=8 --direct=1 --invalidate=0 --output-format=json ", engine,
                     " ", more, " 2>/dev/null"));
    const absl::StatusOr<double> rate =
        text.ok() ? FioRate(*text, direction) : absl::StatusOr<double>(text.status());
    status = rate.status();
    if (!rate.ok()) continue;
    way->Note("rate", *rate);
    break;
  }
  return status;
}

/// Keeps kDepth transfers in flight until the whole file was transferred.
absl::Status Transfer(io::Queue* queue, io::Opcode opcode, int fd, char* buffers,
                      const LimitFile& file) {
  uint64_t next = 0;
  uint64_t done = 0;
  uint32_t free_buffers = (1u << kDepth) - 1;
  while (done < file.bytes) {
    while (next < file.bytes && free_buffers != 0 && queue->CanSubmit()) {
      const auto slot = static_cast<uint32_t>(std::countr_zero(free_buffers));
      const auto bytes = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, file.bytes - next));
      const int error = queue->Submit({.opcode = opcode,
                                       .fd = fd,
                                       .buffer = buffers + uint64_t{slot} * kChunkBytes,
                                       .offset = next,
                                       .bytes = bytes,
                                       .tag = slot});
      if (error != 0) return Error(file, "submit for", error);
      free_buffers &= ~(1u << slot);
      next += bytes;
    }
    io::Completion completions[kDepth];
    const int count = queue->Wait(completions, kDepth, kWaitMs, nullptr);
    if (count <= 0) return Error(file, "wait for", count == 0 ? ETIME : -count);
    for (int i = 0; i < count; ++i) {
      if (completions[i].error != 0) return Error(file, "transfer", completions[i].error);
      done += completions[i].bytes;
      free_buffers |= 1u << completions[i].tag;
    }
  }
  return absl::OkStatus();
}

absl::Status Raw(const Bench& bench, const LimitFile& file, EngineRung engine, io::Opcode opcode,
                 Way* way) {
  const bool write = opcode == io::Opcode::kWrite;
  io::DirectOpen opened;
  int error =
      io::OpenDirect(bench.scratch.fd(), file.name.c_str(),
                     write ? O_CREAT | O_EXCL | O_WRONLY : O_RDONLY, kFileMode, true, &opened);
  if (error != 0) return Error(file, "open", error);
  const base::UniqueFd open(opened.fd);
  // A file system that cannot reserve is measured without a reservation.
  if (write) (void)!fallocate(open.get(), 0, 0, static_cast<off_t>(file.bytes));
  const absl::StatusOr<Memory> buffers = Memory::MakeNoise(uint64_t{kDepth} * kChunkBytes);
  if (!buffers.ok()) return buffers.status();
  // After the memory, so that the queue is closed first.
  const auto queue = std::make_unique<io::Queue>();
  error = queue->Open({.rung = engine,
                       .depth = kDepth,
                       .threads = kThreads,
                       .region = buffers->data(),
                       .region_bytes = buffers->bytes(),
                       .may_register = true});
  if (error != 0) return absl::UnavailableError(queue->reason());

  const Stopwatch watch;
  const absl::Status status = Transfer(queue.get(), opcode, open.get(), buffers->data(), file);
  if (!status.ok()) return status;
  if (write && fsync(open.get()) != 0) return Error(file, "fsync", errno);
  NoteRate(file, watch, way);
  return absl::OkStatus();
}

}  // namespace

absl::Status FioWrite(const Bench& bench, const LimitFile& file, Way* way) {
  return Fio(bench, file, "write", "--fallocate=native --end_fsync=1", way);
}

absl::Status FioRead(const Bench& bench, const LimitFile& file, Way* way) {
  return Fio(bench, file, "read", "--allow_file_create=0", way);
}

absl::Status RawWrite(const Bench& bench, const LimitFile& file, EngineRung engine, Way* way) {
  return Raw(bench, file, engine, io::Opcode::kWrite, way);
}

absl::Status RawRead(const Bench& bench, const LimitFile& file, Way* way) {
  return Raw(bench, file, EngineRung::kAuto, io::Opcode::kRead, way);
}

absl::Status BufferedWrite(const Bench& bench, const LimitFile& file, Way* way) {
  const absl::StatusOr<Memory> buffer = Memory::MakeNoise(kChunkBytes);
  if (!buffer.ok()) return buffer.status();
  const base::UniqueFd open(sys::OpenOwned(bench.scratch.fd(), file.name.c_str(),
                                           O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, kFileMode));
  if (open.get() < 0) return Error(file, "open", errno);
  const Stopwatch watch;
  for (uint64_t done = 0; done < file.bytes;) {
    const uint64_t bytes = std::min<uint64_t>(kChunkBytes, file.bytes - done);
    const ssize_t wrote = ::write(open.get(), buffer->data(), bytes);
    if (wrote <= 0) return Error(file, "write", errno);
    done += static_cast<uint64_t>(wrote);
  }
  if (fsync(open.get()) != 0) return Error(file, "fsync", errno);
  NoteRate(file, watch, way);
  return absl::OkStatus();
}

}  // namespace holdfast::bench
