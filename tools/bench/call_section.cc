// The cost of a save call per tensor beside the copies. The tensors are so small that planning
// takes the time.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/bench/turns.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kCounts[] = {300, 10'000, 100'000, 1'000'000};
// Room for the bytes of one save and for the header, which has fewer bytes per tensor.
constexpr uint64_t kArenaBytesPerTensor = 2 * kSmallTensorBytes;
// Checkpoints of so many tensors stay, because deletions slow the next calls (handoff_section.cc).
constexpr uint32_t kCountKept = 10'000;

/// Gives the tensors names as long as those of a model.
std::vector<TensorSource> Named(std::vector<TensorSource> tensors, const char* stack) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].name = absl::StrCat(stack, ".", i, ".weight");
  }
  return tensors;
}

/// Makes a pair of saves per round: the first with the structure of the other stack, the second
/// with the same structure again.
absl::Status Calls(const Bench& bench, uint32_t count, Way* way) {
  const absl::StatusOr<Memory> memory = Memory::MakeNoise(count * kSmallTensorBytes, Pages::kBase);
  if (!memory.ok()) return memory.status();
  const std::vector<TensorSource> tensors = memory->CutTensors(count);
  const std::vector<TensorSource> stacks[] = {Named(tensors, "encoder"), Named(tensors, "decoder")};
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(
      OptionsFor(bench, std::max(kArenaBytesMin, count * kArenaBytesPerTensor)));
  if (!checkpointer.ok()) return checkpointer.status();
  for (uint32_t round = 0; round < bench.options.pairs + 1; ++round) {
    for (const bool repeated : {false, true}) {
      const absl::StatusOr<SaveCost> cost = MeasureSave(
          checkpointer->get(), absl::StrCat("call-", count, "-", round, repeated ? "-again" : ""),
          stacks[round % 2]);
      if (count > kCountKept) bench.scratch.Empty();
      if (!cost.ok()) return cost.status();
      if (round == 0) continue;  // The first calls touch memory that later calls reuse.
      const double call = (cost->call_seconds - cost->report.time_copying) * kUsPerSecond;
      way->Note(repeated ? "repeated" : "fresh", call);
      way->Note("copying", cost->report.time_copying * kUsPerSecond);
      way->labels = LabelsOf(cost->report);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCall(const Bench& bench) {
  for (const uint32_t count : kCounts) {
    const std::string of = absl::StrCat("tensors_", count);
    ShowStep(absl::StrCat("call: ", count, " tensors"));
    Way way;
    way.failure = Calls(bench, count, &way);
    AddFigure(bench, "call.median_us." + of, "us", way, "fresh");
    AddFigure(bench, "call.repeated_us." + of, "us", way, "repeated");
    AddFigure(bench, "call.copying_us." + of, "us", way, "copying");
  }
  return absl::OkStatus();
}

}  // namespace holdfast::bench
