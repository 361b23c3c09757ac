// The cost of a save call per tensor beside the copies. The tensors are so small that planning
// takes the time.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kCounts[] = {300, 10'000, 100'000, 1'000'000};
constexpr uint64_t kTensorBytes = 256;
// Room for the bytes of one save and for the header, which has fewer bytes per tensor.
constexpr uint64_t kArenaBytesPerTensor = 2 * kTensorBytes;
constexpr double kUsPerSecond = 1e6;

struct Samples {
  std::vector<double> fresh;     // With another structure than the save before.
  std::vector<double> repeated;  // With the same structure.
  std::vector<double> copying;
  Labels labels;
};

/// Gives the tensors names as long as those of a model.
std::vector<TensorSource> Named(std::vector<TensorSource> tensors, const char* stack) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].name = absl::StrCat(stack, ".", i, ".weight");
  }
  return tensors;
}

/// Makes a pair of saves per round: the first with the structure of the other stack, the second
/// with the same structure again.
absl::Status Calls(const Bench& bench, uint32_t count, uint32_t rounds, Samples* samples) {
  const absl::StatusOr<Memory> memory = Memory::MakeNoise(count * kTensorBytes, Pages::kBase);
  if (!memory.ok()) return memory.status();
  const std::vector<TensorSource> tensors = memory->CutTensors(count);
  const std::vector<TensorSource> stacks[] = {Named(tensors, "encoder"), Named(tensors, "decoder")};
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(
      OptionsFor(bench, std::max(kArenaBytesMin, count * kArenaBytesPerTensor)));
  if (!checkpointer.ok()) return checkpointer.status();
  for (uint32_t round = 0; round < rounds + 1; ++round) {
    for (const bool repeated : {false, true}) {
      const absl::StatusOr<SaveCost> cost =
          MeasureSave(checkpointer->get(), absl::StrCat("call-", round, repeated ? "-again" : ""),
                      stacks[round % 2]);
      bench.scratch.Empty();
      if (!cost.ok()) return cost.status();
      if (round == 0) continue;  // The first calls touch memory that later calls reuse.
      const double call = (cost->call_seconds - cost->report.time_copying) * kUsPerSecond;
      (repeated ? samples->repeated : samples->fresh).push_back(call);
      samples->copying.push_back(cost->report.time_copying * kUsPerSecond);
      samples->labels = LabelsOf(cost->report);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCall(const Bench& bench) {
  for (const uint32_t count : kCounts) {
    const std::string of = absl::StrCat("tensors_", count);
    ShowStep(absl::StrCat("call: ", count, " tensors"));
    Samples samples;
    const absl::Status status = Calls(bench, count, bench.options.pairs, &samples);
    if (!status.ok()) {
      bench.figures.AddMissing("call.median_us." + of, status.ToString());
      bench.figures.AddMissing("call.repeated_us." + of, status.ToString());
      continue;
    }
    bench.figures.Add("call.median_us." + of, "us", samples.fresh, samples.labels);
    bench.figures.Add("call.repeated_us." + of, "us", samples.repeated, samples.labels);
    bench.figures.Add("call.copying_us." + of, "us", samples.copying, samples.labels);
  }
  return absl::OkStatus();
}

}  // namespace holdfast::bench
