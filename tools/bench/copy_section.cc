// Copying into the staging memory, plain and fused with the digest, against memcpy into warm
// memory.
#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tools/bench/turns.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

// More than any cache; the whole save must fit the arena, so that no copy waits for the disk.
constexpr uint64_t kBytesMax = uint64_t{1} << 30;

void MemcpyTurn(const std::vector<TensorSource>& tensors, const Memory& to, Way* way) {
  const Stopwatch watch;
  uint64_t at = 0;
  for (const TensorSource& tensor : tensors) {
    std::memcpy(to.data() + at, tensor.data, tensor.bytes);
    at += tensor.bytes;
  }
  way->Note("rate", static_cast<double>(at) / watch.seconds());
}

absl::Status SaveTurn(const Bench& bench, const std::vector<TensorSource>& tensors,
                      Checkpointer* checkpointer, Way* way) {
  const absl::StatusOr<SaveCost> cost =
      MeasureSave(checkpointer, absl::StrCat("copy-", way->name), tensors);
  if (!cost.ok()) return cost.status();
  way->Note("rate", static_cast<double>(cost->report.bytes) / cost->report.time_copying);
  way->Note("total_cpu", cost->total_cpu / cost->gib());
  way->labels = LabelsOf(cost->report);
  bench.scratch.Empty();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCopy(const Bench& bench) {
  const uint64_t bytes = std::min(bench.options.bytes, kBytesMax);
  const absl::StatusOr<Memory> from = Memory::MakeNoise(bytes);
  if (!from.ok()) return from.status();
  const absl::StatusOr<Memory> to = Memory::Make(bytes, Pages::kHuge);
  if (!to.ok()) return to.status();
  const std::vector<TensorSource> tensors = from->CutTensors(kTensors);
  std::vector<Way> ways = {{"memcpy", [&](Way* way) {
                              MemcpyTurn(tensors, *to, way);
                              return absl::OkStatus();
                            }}};
  std::unique_ptr<Checkpointer> checkpointers[2];
  for (const bool fused : {false, true}) {
    CheckpointerOptions options = OptionsFor(bench, DefaultArenaBytes({.state_bytes = bytes}));
    options.fused_copy = fused;
    absl::StatusOr<std::unique_ptr<Checkpointer>> made = Checkpointer::Create(options);
    if (!made.ok()) return made.status();
    checkpointers[fused] = *std::move(made);
    ways.push_back({fused ? "fused" : "plain", [&, fused](Way* way) {
                      return SaveTurn(bench, tensors, checkpointers[fused].get(), way);
                    }});
  }
  TakeTurns(bench, "copy", &ways);
  AddFigure(bench, "memcpy.bytes_per_second", "B/s", ways[0], "rate");
  for (const Way* way : {&ways[1], &ways[2]}) {
    if (!way->failure.ok()) return way->failure;
    AddRatio(bench, absl::StrCat("copy.ratio_to_memcpy.", way->name), *way, "rate",
             ways[0].Of("rate"));
    AddFigure(bench, absl::StrCat("copy.bytes_per_second.", way->name), "B/s", *way, "rate");
    AddFigure(bench, absl::StrCat("copy.total_cpu_seconds_per_gib.", way->name), "s/GiB", *way,
              "total_cpu");
  }
  return absl::OkStatus();
}

}  // namespace holdfast::bench
