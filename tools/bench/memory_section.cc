// A save eight times its staging memory: checks the cap, and the worker's private memory.
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tools/bench/turns.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

constexpr uint64_t kTimesArena = 8;
constexpr uint64_t kArenaGranule = uint64_t{2} << 20;
constexpr uint32_t kSaves = 9;

}  // namespace

absl::Status RunMemory(const Bench& bench) {
  const uint64_t arena =
      std::max(kArenaBytesMin, bench.options.bytes / kTimesArena / kArenaGranule * kArenaGranule);
  const absl::StatusOr<Memory> memory = Memory::MakeNoise(arena * kTimesArena);
  if (!memory.ok()) return memory.status();
  const std::vector<TensorSource> tensors = memory->CutTensors(kTensors);
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer =
      Checkpointer::Create(OptionsFor(bench, arena));
  if (!checkpointer.ok()) return checkpointer.status();

  Way way;
  const uint32_t saves = std::min(kSaves, bench.options.pairs);
  for (uint32_t i = 0; i < saves; ++i) {
    ShowStep(absl::StrCat("memory: save ", i + 1, " of ", saves));
    const absl::StatusOr<SaveCost> cost =
        MeasureSave(checkpointer->get(), absl::StrCat("large-", i), tensors);
    if (!cost.ok()) return cost.status();
    way.labels = LabelsOf(cost->report);
    way.Note("peak", static_cast<double>((*checkpointer)->staging().bytes_held_peak));
    way.Note("private", static_cast<double>(cost->report.worker_private_bytes_peak));
    way.Note("stall", cost->call_seconds / cost->gib());
    way.Note("waiting", cost->report.time_waiting_memory / cost->gib());
    bench.scratch.Empty();
  }
  way.Note("cap", static_cast<double>((*checkpointer)->staging().arena_bytes));
  AddFigure(bench, "arena.bytes_cap", "B", way, "cap");
  AddFigure(bench, "arena.bytes_peak", "B", way, "peak");
  AddFigure(bench, "worker.private_bytes", "B", way, "private");
  AddFigure(bench, "streamed.stall_seconds_per_gib", "s/GiB", way, "stall");
  AddFigure(bench, "streamed.waiting_seconds_per_gib", "s/GiB", way, "waiting");
  return absl::OkStatus();
}

}  // namespace holdfast::bench
