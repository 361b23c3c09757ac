#include "tools/bench/workload.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"

namespace holdfast::bench {
namespace {

constexpr uint64_t kBasePageBytes = 4096;

double Now() {
  timespec time = {};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double Cpu(int who) {
  rusage usage = {};
  getrusage(who, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

}  // namespace

Stopwatch::Stopwatch() : wall_(Now()), cpu_(Cpu(RUSAGE_SELF)), children_(Cpu(RUSAGE_CHILDREN)) {}
double Stopwatch::seconds() const { return Now() - wall_; }
double Stopwatch::cpu_seconds() const { return Cpu(RUSAGE_SELF) - cpu_; }
double Stopwatch::children_cpu_seconds() const { return Cpu(RUSAGE_CHILDREN) - children_; }

absl::StatusOr<Memory> Memory::Make(uint64_t bytes, Pages pages) {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("take ", bytes, " bytes of memory: ", std::strerror(errno)));
  }
  // Advice only: without huge pages everything works, slower.
  madvise(data, bytes, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  Memory memory(static_cast<char*>(data), bytes);
  for (uint64_t at = 0; at < bytes; at += kBasePageBytes) memory.data_[at] = 1;
  return memory;
}

absl::StatusOr<Memory> Memory::MakeNoise(uint64_t bytes, Pages pages) {
  absl::StatusOr<Memory> memory = Make(bytes, pages);
  if (!memory.ok()) return memory;
  uint64_t state = 0x9E3779B97F4A7C15ull ^ bytes;
  for (uint64_t at = 0; at + sizeof(state) <= bytes; at += sizeof(state)) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(memory->data() + at, &state, sizeof(state));
  }
  return memory;
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::vector<TensorSource> Memory::CutTensors(uint32_t count) const {
  std::vector<TensorSource> tensors(count);
  const uint64_t each = bytes_ / count / sizeof(float) * sizeof(float);
  for (uint32_t i = 0; i < count; ++i) {
    tensors[i].name = absl::StrCat("tensor.", i);
    tensors[i].dtype = "F32";
    tensors[i].shape = {static_cast<int64_t>(each / sizeof(float))};
    tensors[i].data = data_ + i * each;
    tensors[i].bytes = each;
  }
  return tensors;
}

Scratch::~Scratch() {
  if (fd_ >= 0) close(fd_);
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<Scratch> Scratch::Make(const std::string& directory, uint64_t bytes_needed,
                                      uint32_t settle_ms) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(directory, error);
  if (!error && space.available < bytes_needed) {
    return absl::ResourceExhaustedError(
        absl::StrCat("measure in ", directory, ": ", space.available, " bytes are free, ",
                     bytes_needed, " are needed; give less --bytes or another --dir"));
  }
  std::string path = absl::StrCat(directory, "/holdfast-bench-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("make a directory in ", directory, ": ", std::strerror(errno)));
  }
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return Scratch(path, fd, settle_ms);
}

void Scratch::Empty() const {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
    std::filesystem::remove_all(entry.path(), ignored);
  }
  syncfs(fd_);
  std::this_thread::sleep_for(std::chrono::milliseconds(settle_ms_));
}

CheckpointerOptions OptionsFor(const Bench& bench, uint64_t arena_bytes) {
  CheckpointerOptions options;
  options.directory = bench.scratch.path();
  options.launcher = bench.options.launcher;
  options.staging.arena_bytes = arena_bytes;
  return options;
}

absl::StatusOr<SaveCost> MeasureSave(Checkpointer* checkpointer, const std::string& name,
                                     const std::vector<TensorSource>& tensors) {
  SaveRequest request;
  request.name = name;
  request.tensors = tensors;
  SaveCost cost;
  const Stopwatch watch;
  const absl::StatusOr<SaveHandle> handle = checkpointer->SaveAsync(request);
  cost.call_seconds = watch.seconds();
  if (!handle.ok()) return handle.status();
  absl::StatusOr<SaveReport> report = handle->WaitDurable(absl::InfiniteDuration());
  if (!report.ok()) return report.status();
  cost.report = *std::move(report);
  // The kernel's figure of an ended process includes its start and end. A kept worker or a thread
  // adds nothing to the kernel's figure and reports its CPU time.
  cost.worker_cpu = std::max(watch.children_cpu_seconds(), cost.report.cpu_worker);
  const bool in_process = cost.report.launcher == Launcher::kThread;
  cost.total_cpu = watch.cpu_seconds() + (in_process ? 0.0 : cost.worker_cpu);
  return cost;
}

}  // namespace holdfast::bench
