// What a save call costs beside the copies: 300 tensors so small that copying does not matter, in
// a small trainer and in a large one.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "tools/bench/late_device.h"
#include "tools/bench/memory.h"
#include "tools/bench/one_save.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kTensors = 300;
constexpr uint64_t kTensorBytes = 256;
constexpr uint64_t kArenaBytes = uint64_t{16} << 20;
constexpr uint32_t kRounds = 3;
constexpr double kUsPerSecond = 1e6;
// A directory with many entries would be part of what is measured.
constexpr uint32_t kSavesBetweenEmptying = 50;

constexpr Launcher kLaunchers[] = {Launcher::kSpawn, Launcher::kFork, Launcher::kPersistent,
                                   Launcher::kThread};

/// Microseconds per call, in one size of the trainer.
struct Samples {
  std::vector<double> small;
  std::vector<double> large;
  std::vector<double> launching;
  std::vector<double> growth;  // Of the medians, one per round.
  Labels labels;
  std::string failure;
};

absl::Status Calls(const Bench& bench, Launcher launcher, uint32_t calls,
                   const std::vector<TensorSource>& tensors, std::vector<double>* out,
                   Samples* samples) {
  CheckpointerOptions options = OptionsFor(bench, kArenaBytes);
  options.launcher = launcher;
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(options);
  if (!checkpointer.ok()) return checkpointer.status();
  constexpr uint32_t kWarmUp = 2;  // The first calls touch what later ones reuse.
  for (uint32_t i = 0; i < calls + kWarmUp; ++i) {
    const absl::StatusOr<SaveCost> cost =
        MeasureSave(checkpointer->get(), absl::StrCat("call-", i), tensors);
    if (!cost.ok()) return cost.status();
    if (i >= kWarmUp) {
      out->push_back((cost->call_seconds - cost->report.time_copying) * kUsPerSecond);
      samples->launching.push_back(cost->report.time_launching * kUsPerSecond);
      samples->labels = LabelsOf(cost->report);
    }
    if (i % kSavesBetweenEmptying == kSavesBetweenEmptying - 1) bench.scratch.Empty();
  }
  bench.scratch.Empty();
  return absl::OkStatus();
}

/// All launchers, once, in a trainer with `ballast` resident bytes.
absl::Status Block(const Bench& bench, uint64_t ballast_bytes, bool large, uint32_t calls,
                   const std::vector<TensorSource>& tensors, std::map<Launcher, Samples>* samples) {
  const absl::StatusOr<Memory> ballast = Memory::Make(ballast_bytes, Pages::kBase);
  if (!ballast.ok()) return ballast.status();
  for (const Launcher launcher : kLaunchers) {
    Samples& of = (*samples)[launcher];
    if (!of.failure.empty()) continue;
    ShowStep(
        absl::StrCat("handoff: ", WordOf(launcher), ", trainer of ", ballast_bytes >> 20, " MiB"));
    std::vector<double> block;
    const absl::Status status = Calls(bench, launcher, calls, tensors, &block, &of);
    if (!status.ok()) {
      of.failure = status.ToString();
      continue;
    }
    std::vector<double>& all = large ? of.large : of.small;
    all.insert(all.end(), block.begin(), block.end());
    if (large) {
      const std::vector<double> before(of.small.end() - static_cast<long>(block.size()),
                                       of.small.end());
      of.growth.push_back(Median(block) / Median(before));
    }
  }
  return absl::OkStatus();
}

/// The same call with tensors that live on a device, whose copies end after it has returned.
void AddDevice(const Bench& bench, std::vector<TensorSource> tensors) {
  LateDevice device;
  for (TensorSource& tensor : tensors) tensor.device = &device;
  Samples samples;
  const absl::Status status =
      Calls(bench, bench.options.launcher, bench.options.calls, tensors, &samples.small, &samples);
  if (!status.ok()) return bench.figures.AddMissing("handoff.median_us.device", status.ToString());
  bench.figures.Add("handoff.median_us.device", "us", samples.small, samples.labels);
}

}  // namespace

absl::Status RunHandoff(const Bench& bench) {
  const absl::StatusOr<Memory> memory = Memory::Make(kTensors * kTensorBytes, Pages::kBase);
  if (!memory.ok()) return memory.status();
  FillWithNoise(*memory);
  const std::vector<TensorSource> tensors = CutTensors(*memory, kTensors);
  // The machine must keep some memory of its own.
  uint64_t large = bench.options.ballast_bytes;
  if (const uint64_t available = MemoryAvailable(); available != 0) {
    large = std::min(large, available / 4 * 3);
  }
  bench.figures.AddFact("handoff.ballast_bytes", absl::StrCat(large));

  const uint32_t rounds = std::min(kRounds, bench.options.pairs);
  const uint32_t calls = std::max(1u, (bench.options.calls + rounds - 1) / rounds);
  std::map<Launcher, Samples> samples;
  for (uint32_t round = 0; round < rounds; ++round) {
    for (const bool is_large : {false, true}) {
      const absl::Status status =
          Block(bench, is_large ? large : kBallastSmallBytes, is_large, calls, tensors, &samples);
      if (!status.ok()) return status;
    }
  }
  for (const auto& [launcher, of] : samples) {
    const std::string name = WordOf(launcher);
    if (!of.failure.empty()) {
      bench.figures.AddMissing("handoff.median_us." + name, of.failure);
      bench.figures.AddMissing("handoff.growth_ratio." + name, of.failure);
      continue;
    }
    bench.figures.Add("handoff.median_us." + name, "us", of.small, of.labels);
    bench.figures.Add("handoff.median_us_large_trainer." + name, "us", of.large, of.labels);
    bench.figures.Add("handoff.launching_us." + name, "us", of.launching, of.labels);
    bench.figures.Add("handoff.growth_ratio." + name, "ratio", of.growth, of.labels);
  }
  AddDevice(bench, tensors);
  return absl::OkStatus();
}

}  // namespace holdfast::bench
