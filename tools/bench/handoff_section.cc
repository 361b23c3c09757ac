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
constexpr uint32_t kRounds = 9;
constexpr double kUsPerSecond = 1e6;
// A directory with many entries would be part of what is measured.
constexpr uint32_t kSavesBetweenEmptying = 50;

/// One kind of call: by a launcher from host memory, or from a device by the launcher of the run.
struct Way {
  std::string name;
  Launcher launcher = Launcher::kSpawn;
  const std::vector<TensorSource>* tensors = nullptr;
};

/// Microseconds per call, in one size of the trainer.
struct Samples {
  std::vector<double> small;
  std::vector<double> large;
  std::vector<double> launching;
  std::vector<double> medians[2];  // One per round: in the small trainer, in the large one.
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

/// All ways, once, in a trainer with `ballast` resident bytes.
absl::Status Block(const Bench& bench, uint64_t ballast_bytes, bool large, uint32_t calls,
                   const std::vector<Way>& ways, std::map<std::string, Samples>* samples) {
  const absl::StatusOr<Memory> ballast = Memory::Make(ballast_bytes, Pages::kBase);
  if (!ballast.ok()) return ballast.status();
  for (const Way& way : ways) {
    Samples& of = (*samples)[way.name];
    if (!of.failure.empty()) continue;
    ShowStep(absl::StrCat("handoff: ", way.name, ", trainer of ", ballast_bytes >> 20, " MiB"));
    std::vector<double> block;
    const absl::Status status = Calls(bench, way.launcher, calls, *way.tensors, &block, &of);
    if (!status.ok()) {
      of.failure = status.ToString();
      continue;
    }
    std::vector<double>& all = large ? of.large : of.small;
    all.insert(all.end(), block.begin(), block.end());
    of.medians[large ? 1 : 0].push_back(Median(block));
  }
  return absl::OkStatus();
}

/// Of two ways, or of two sizes of the trainer, round by round.
std::vector<double> Ratios(const std::vector<double>& of, const std::vector<double>& to) {
  std::vector<double> ratios;
  for (size_t i = 0; i < of.size() && i < to.size(); ++i) ratios.push_back(of[i] / to[i]);
  return ratios;
}

}  // namespace

absl::Status RunHandoff(const Bench& bench) {
  const absl::StatusOr<Memory> memory = Memory::Make(kTensors * kTensorBytes, Pages::kBase);
  if (!memory.ok()) return memory.status();
  FillWithNoise(*memory);
  const std::vector<TensorSource> tensors = CutTensors(*memory, kTensors);
  // The machine must keep some memory of its own.
  const uint64_t large = std::min(bench.options.ballast_bytes, MemoryAvailable() / 4 * 3);
  bench.figures.AddFact("handoff.ballast_bytes", absl::StrCat(large));

  const uint32_t rounds = std::min(kRounds, bench.options.pairs);
  const uint32_t calls = std::max(1u, (bench.options.calls + rounds - 1) / rounds);
  LateDevice device;
  std::vector<TensorSource> on_device = tensors;
  for (TensorSource& tensor : on_device) tensor.device = &device;
  std::vector<Way> ways;
  for (const Launcher launcher :
       {Launcher::kSpawn, Launcher::kFork, Launcher::kPersistent, Launcher::kThread}) {
    ways.push_back({.name = WordOf(launcher), .launcher = launcher, .tensors = &tensors});
  }
  // The same call with tensors that live on a device, whose copies end after it has returned.
  ways.push_back({.name = "device", .launcher = bench.options.launcher, .tensors = &on_device});
  std::map<std::string, Samples> samples;
  for (uint32_t round = 0; round < rounds; ++round) {
    for (const bool is_large : {false, true}) {
      const absl::Status status =
          Block(bench, is_large ? large : kBallastSmallBytes, is_large, calls, ways, &samples);
      if (!status.ok()) return status;
    }
  }
  for (const auto& [name, of] : samples) {
    if (!of.failure.empty()) {
      bench.figures.AddMissing("handoff.median_us." + name, of.failure);
      bench.figures.AddMissing("handoff.growth_ratio." + name, of.failure);
      continue;
    }
    bench.figures.Add("handoff.median_us." + name, "us", of.small, of.labels);
    bench.figures.Add("handoff.median_us_large_trainer." + name, "us", of.large, of.labels);
    bench.figures.Add("handoff.launching_us." + name, "us", of.launching, of.labels);
    bench.figures.Add("handoff.growth_ratio." + name, "ratio", Ratios(of.medians[1], of.medians[0]),
                      of.labels);
  }
  const Samples& late = samples["device"];
  const Samples& host = samples[WordOf(bench.options.launcher)];
  if (late.failure.empty() && host.failure.empty()) {
    bench.figures.Add("handoff.device_ratio", "ratio", Ratios(late.medians[0], host.medians[0]),
                      late.labels);
  }
  return absl::OkStatus();
}

}  // namespace holdfast::bench
