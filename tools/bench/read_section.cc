// Verifying and loading against the disk's read limit, on one checkpoint, in turn.
#include "holdfast/load.h"
#include "holdfast/verify.h"
#include "tools/bench/limits.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

absl::Status VerifyTurn(const SaveReport& subject, Way* way) {
  const Stopwatch watch;
  const absl::StatusOr<VerifyReport> report = Verify(subject.path, {});
  if (!report.ok()) return report.status();
  if (report->verdict != Verdict::kSound) return absl::DataLossError(subject.path + " is unsound");
  way->labels.engine = WordOf(report->engine);
  way->Note("rate", static_cast<double>(subject.bytes) / watch.seconds());
  return absl::OkStatus();
}

absl::Status LoadTurn(const SaveReport& subject, const std::vector<TensorTarget>& targets,
                      Way* way) {
  const Stopwatch watch;
  const absl::StatusOr<std::unique_ptr<CheckpointReader>> reader =
      CheckpointReader::Open(subject.path);
  if (!reader.ok()) return reader.status();
  const absl::StatusOr<LoadReport> report = (*reader)->Load(targets, {});
  if (!report.ok()) return report.status();
  way->labels.engine = WordOf(report->engine);
  way->Note("rate", static_cast<double>(report->bytes) / watch.seconds());
  return absl::OkStatus();
}

absl::StatusOr<SaveReport> SaveSubject(const Bench& bench,
                                       const std::vector<TensorSource>& tensors) {
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(
      OptionsFor(bench, DefaultArenaBytes({.state_bytes = bench.options.bytes})));
  if (!checkpointer.ok()) return checkpointer.status();
  const absl::StatusOr<SaveCost> cost = MeasureSave(checkpointer->get(), "subject", tensors);
  if (!cost.ok()) return cost.status();
  return cost->report;
}

}  // namespace

absl::Status RunRead(const Bench& bench) {
  const absl::StatusOr<Memory> memory = Memory::MakeNoise(bench.options.bytes);
  if (!memory.ok()) return memory.status();
  const std::vector<TensorSource> tensors = memory->CutTensors(kTensors);
  const absl::StatusOr<SaveReport> subject = SaveSubject(bench, tensors);
  if (!subject.ok()) return subject.status();
  std::vector<TensorTarget> targets;
  for (const TensorSource& tensor : tensors) {
    targets.push_back({.name = tensor.name,
                       .data = const_cast<void*>(tensor.data),  // `memory`'s, ours.
                       .bytes = tensor.bytes});
  }
  // The only data file, without the tail that direct I/O cannot read.
  const LimitFile file = {.name = "subject/model-00000-of-00001.safetensors",
                          .bytes = subject->bytes / kIoAlignment * kIoAlignment};
  std::vector<Way> ways = {
      {"fio", [&](Way* way) { return FioRead(bench, file, way); }},
      {"engine", [&](Way* way) { return RawRead(bench, file, way); }},
      {"verify", [&](Way* way) { return VerifyTurn(*subject, way); }},
      {"load", [&](Way* way) { return LoadTurn(*subject, targets, way); }},
  };
  TakeTurns(bench, "read", &ways);
  const Way& fio = ways[0];
  for (size_t i = 1; i < ways.size(); ++i) {
    if (!ways[i].failure.ok()) return ways[i].failure;
  }
  const std::vector<double> limit = Better(fio.Of("rate"), ways[1].Of("rate"));
  for (const Way* way : {&ways[2], &ways[3]}) {
    AddRatio(bench, way->name + ".ratio_to_raw", *way, "rate", limit);
    AddFigure(bench, way->name + ".bytes_per_second", "B/s", *way, "rate");
  }
  AddFigure(bench, "raw.read_bytes_per_second.engine", "B/s", ways[1], "rate");
  AddFigure(bench, "raw.read_bytes_per_second.fio", "B/s", fio, "rate");
  return absl::OkStatus();
}

}  // namespace holdfast::bench
