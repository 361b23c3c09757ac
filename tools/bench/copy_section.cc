// Copying into the staging memory, plain and fused with the digest, against memcpy into warm
// memory.
#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tools/bench/clock.h"
#include "tools/bench/memory.h"
#include "tools/bench/one_save.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kTensors = 64;
// More than any cache; the whole save must fit the arena, so that no copy waits for the disk.
constexpr uint64_t kBytesMax = uint64_t{1} << 30;

struct Kind {
  const char* name;
  bool fused;
  std::unique_ptr<Checkpointer> checkpointer = nullptr;
  std::vector<double> rates = {};
  std::vector<double> ratios = {};
  std::vector<double> total_cpu = {};
  Labels labels = {};
};

double MemcpyRate(const std::vector<TensorSource>& tensors, const Memory& to) {
  const Stopwatch watch;
  uint64_t at = 0;
  for (const TensorSource& tensor : tensors) {
    std::memcpy(to.data() + at, tensor.data, tensor.bytes);
    at += tensor.bytes;
  }
  return static_cast<double>(at) / watch.seconds();
}

absl::Status Turn(const Bench& bench, const std::vector<TensorSource>& tensors, Kind* kind) {
  const absl::StatusOr<SaveCost> cost =
      MeasureSave(kind->checkpointer.get(), absl::StrCat("copy-", kind->name), tensors);
  if (!cost.ok()) return cost.status();
  kind->rates.push_back(static_cast<double>(cost->report.bytes) / cost->report.time_copying);
  kind->total_cpu.push_back(cost->total_cpu / cost->gib());
  kind->labels = LabelsOf(cost->report);
  bench.scratch.Empty();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCopy(const Bench& bench) {
  const uint64_t bytes = std::min(bench.options.bytes, kBytesMax);
  const absl::StatusOr<Memory> from = Memory::Make(bytes, Pages::kHuge);
  if (!from.ok()) return from.status();
  FillWithNoise(*from);
  const absl::StatusOr<Memory> to = Memory::Make(bytes, Pages::kHuge);
  if (!to.ok()) return to.status();
  const std::vector<TensorSource> tensors = CutTensors(*from, kTensors);

  Kind kinds[] = {{"plain", false}, {"fused", true}};
  for (Kind& kind : kinds) {
    CheckpointerOptions options = OptionsFor(bench, DefaultArenaBytes({.state_bytes = bytes}));
    options.fused_copy = kind.fused;
    absl::StatusOr<std::unique_ptr<Checkpointer>> made = Checkpointer::Create(options);
    if (!made.ok()) return made.status();
    kind.checkpointer = *std::move(made);
  }
  std::vector<double> memcpy_rates;
  for (uint32_t round = 0; round < bench.options.pairs; ++round) {
    ShowStep(absl::StrCat("copy: round ", round + 1, " of ", bench.options.pairs));
    constexpr uint32_t kTurns = 3;
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t which = (turn + round) % kTurns;
      if (which == 0) {
        memcpy_rates.push_back(MemcpyRate(tensors, *to));
      } else if (const absl::Status status = Turn(bench, tensors, &kinds[which - 1]);
                 !status.ok()) {
        return status;
      }
    }
    for (Kind& kind : kinds) kind.ratios.push_back(kind.rates.back() / memcpy_rates.back());
  }
  bench.figures.Add("memcpy.bytes_per_second", "B/s", memcpy_rates);
  for (const Kind& kind : kinds) {
    bench.figures.Add(absl::StrCat("copy.ratio_to_memcpy.", kind.name), "ratio", kind.ratios,
                      kind.labels);
    bench.figures.Add(absl::StrCat("copy.bytes_per_second.", kind.name), "B/s", kind.rates,
                      kind.labels);
    bench.figures.Add(absl::StrCat("copy.total_cpu_seconds_per_gib.", kind.name), "s/GiB",
                      kind.total_cpu, kind.labels);
  }
  return absl::OkStatus();
}

}  // namespace holdfast::bench
