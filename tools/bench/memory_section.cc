// A save eight times its staging memory: the cap holds, and the worker's own memory stays small.
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tools/bench/memory.h"
#include "tools/bench/one_save.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kTensors = 64;
constexpr uint64_t kTimesArena = 8;
constexpr uint64_t kArenaBytesMin = uint64_t{16} << 20;
constexpr uint64_t kArenaGranule = uint64_t{2} << 20;
constexpr uint32_t kSaves = 9;

}  // namespace

absl::Status RunMemory(const Bench& bench) {
  const uint64_t arena =
      std::max(kArenaBytesMin, bench.options.bytes / kTimesArena / kArenaGranule * kArenaGranule);
  const absl::StatusOr<Memory> memory = Memory::Make(arena * kTimesArena, Pages::kHuge);
  if (!memory.ok()) return memory.status();
  FillWithNoise(*memory);
  const std::vector<TensorSource> tensors = CutTensors(*memory, kTensors);
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer =
      Checkpointer::Create(OptionsFor(bench, arena));
  if (!checkpointer.ok()) return checkpointer.status();

  std::vector<double> peaks, stalls, waits, privates;
  Labels labels;
  const uint32_t saves = std::min(kSaves, bench.options.pairs);
  for (uint32_t i = 0; i < saves; ++i) {
    ShowStep(absl::StrCat("memory: save ", i + 1, " of ", saves));
    const absl::StatusOr<SaveCost> cost =
        MeasureSave(checkpointer->get(), absl::StrCat("large-", i), tensors);
    if (!cost.ok()) return cost.status();
    labels = LabelsOf(cost->report);
    peaks.push_back(static_cast<double>((*checkpointer)->staging().bytes_held_peak));
    privates.push_back(static_cast<double>(cost->report.worker_private_bytes_peak));
    stalls.push_back(cost->call_seconds / cost->gib());
    waits.push_back(cost->report.time_waiting_memory / cost->gib());
    bench.scratch.Empty();
  }
  const auto cap = static_cast<double>((*checkpointer)->staging().arena_bytes);
  bench.figures.Add("arena.bytes_cap", "B", {cap}, labels);
  bench.figures.Add("arena.bytes_peak", "B", peaks, labels);
  bench.figures.Add("worker.private_bytes", "B", privates, labels);
  bench.figures.Add("streamed.stall_seconds_per_gib", "s/GiB", stalls, labels);
  bench.figures.Add("streamed.waiting_seconds_per_gib", "s/GiB", waits, labels);
  return absl::OkStatus();
}

}  // namespace holdfast::bench
