// How many ranks wait for each other: metadata calls a second while one rank is late, and the time
// from the last vote to the end on every rank. Each rank is a worker's thread with a file of 1 KiB.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "runtime/sys/system.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kNsPerSecond = 1'000'000'000;
constexpr uint64_t kArenaBytes = 64 << 10;
constexpr uint64_t kFileBytes = 1 << 10;
// Until rank 0 has looked at the manifest of every rank that has voted.
constexpr unsigned kSettleSeconds = 5;
constexpr unsigned kLateSeconds = 10;

std::atomic<uint64_t> g_metadata_calls{0};
std::atomic<uint64_t> g_data_calls{0};

void CountCalls() {
  sys::SystemCalls& system = sys::g_system;
  system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    ++g_metadata_calls;
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  system.fstatat = [](int directory, const char* path, struct stat* out, int flags) {
    ++g_metadata_calls;
    return sys::kKernel.fstatat(directory, path, out, flags);
  };
  system.statx = [](int directory, const char* path, int flags, unsigned mask, struct statx* out) {
    ++g_metadata_calls;
    return sys::kKernel.statx(directory, path, flags, mask, out);
  };
  system.getdents64 = [](int fd, void* buffer, size_t bytes) {
    ++g_metadata_calls;
    return sys::kKernel.getdents64(fd, buffer, bytes);
  };
  system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) {
    ++g_data_calls;
    return sys::kKernel.pread(fd, buffer, bytes, offset);
  };
  system.pwrite = [](int fd, const void* buffer, size_t bytes, off_t offset) {
    ++g_data_calls;
    return sys::kKernel.pwrite(fd, buffer, bytes, offset);
  };
}

struct Rank {
  Rank(const std::string& directory, uint32_t rank, uint32_t world)
      : trainer(kArenaBytes), save(&trainer, directory) {
    save.parameters.rank = rank;
    save.parameters.world_size = world;
    save.parameters.engine = EngineRung::kPwrite;
    save.parameters.pwrite_threads = 0;
    save.parameters.time_ranks_max_ns = 600 * kNsPerSecond;
    save.parameters.time_stalled_max_ns = 600 * kNsPerSecond;
    save.AddFile("data-" + std::to_string(rank), {kFileBytes});
    save.Build();
    save.SealAll();
  }
  void Start() {
    worker = std::make_unique<TestWorker>(Launcher::kThread, trainer);
    save.StartOn(worker.get());
  }
  bool IsIn(layout::Phase phase) const {
    return save.job()->phase.load() == static_cast<uint32_t>(phase);
  }
  Trainer trainer;
  TestSave save;
  std::unique_ptr<TestWorker> worker;
};

void AwaitPhase(const Rank& rank, layout::Phase phase) {
  while (!rank.IsIn(phase) && !rank.save.AwaitDone(0)) ::usleep(1000);
}

int Run(const std::string& below, uint32_t world) {
  TestDirectory directory(below);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t i = 0; i < world; ++i) {
    ranks.push_back(std::make_unique<Rank>(directory.path(), i, world));
  }
  CountCalls();
  for (uint32_t i = 0; i + 1 < world; ++i) ranks[i]->Start();
  for (uint32_t i = 0; i + 1 < world; ++i) {
    AwaitPhase(*ranks[i], layout::Phase::kWaitingForRanks);
  }
  ::sleep(kSettleSeconds);
  const uint64_t metadata_before = g_metadata_calls;
  const uint64_t data_before = g_data_calls;
  ::sleep(kLateSeconds);
  const double metadata = static_cast<double>(g_metadata_calls - metadata_before) / kLateSeconds;
  const double data = static_cast<double>(g_data_calls - data_before) / kLateSeconds;
  ranks.back()->Start();
  AwaitPhase(*ranks.back(), layout::Phase::kWaitingForRanks);
  const uint64_t voted_ns = sys::NowNs();
  int failed = 0;
  for (const auto& rank : ranks) {
    if (!rank->save.AwaitDone(600) || !rank->save.failure().ok()) ++failed;
  }
  const double seconds = static_cast<double>(sys::NowNs() - voted_ns) / kNsPerSecond;
  ranks.clear();
  sys::g_system = sys::kKernel;
  std::printf(
      "%u ranks, one late: %.1f metadata and %.1f data calls a second by all ranks together; "
      "%.2f s from the last vote to the end on every rank; %d failed\n",
      world, metadata, data, seconds, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace holdfast::worker

int main(int argc, char** argv) {
  const std::string below = argc > 1 ? argv[1] : "/tmp";
  const auto ranks = static_cast<uint32_t>(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1000);
  return holdfast::worker::Run(below, ranks);
}
