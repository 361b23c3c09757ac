// Verifying and loading against the disk's read limit, on one checkpoint, in turn.
#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "holdfast/load.h"
#include "holdfast/pod.h"
#include "holdfast/verify.h"
#include "tools/bench/clock.h"
#include "tools/bench/fio.h"
#include "tools/bench/memory.h"
#include "tools/bench/one_save.h"
#include "tools/bench/raw_io.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kTensors = 64;

/// The checkpoint under test and what it is read into.
struct Subject {
  std::string path;
  RawRequest raw;  // its one data file, without the tail that direct I/O cannot read
  uint64_t bytes = 0;
  std::vector<TensorTarget> targets;
};

absl::StatusOr<Subject> Prepare(const Bench& bench, const Memory& memory) {
  const std::vector<TensorSource> tensors = CutTensors(memory, kTensors);
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(
      OptionsFor(bench, DefaultArenaBytes({.state_bytes = bench.options.bytes})));
  if (!checkpointer.ok()) return checkpointer.status();
  const absl::StatusOr<SaveCost> cost = MeasureSave(checkpointer->get(), "subject", tensors);
  if (!cost.ok()) return cost.status();
  Subject subject;
  subject.path = cost->report.path;
  subject.bytes = cost->report.bytes;
  subject.raw = {.directory = bench.scratch.fd(),
                 .name = "subject/model-00000-of-00001.safetensors",
                 .bytes = cost->report.bytes / kIoAlignment * kIoAlignment};
  for (const TensorSource& tensor : tensors) {
    subject.targets.push_back({.name = tensor.name,
                               .data = const_cast<void*>(tensor.data),  // `memory`'s, ours.
                               .bytes = tensor.bytes});
  }
  return subject;
}

absl::StatusOr<double> VerifyRate(const Subject& subject, Labels* labels) {
  const Stopwatch watch;
  const absl::StatusOr<VerifyReport> report = Verify(subject.path, {});
  const double seconds = watch.seconds();
  if (!report.ok()) return report.status();
  if (report->verdict != Verdict::kSound) {
    return absl::DataLossError(absl::StrCat(subject.path, " is not sound"));
  }
  labels->engine = WordOf(report->engine);
  return static_cast<double>(subject.bytes) / seconds;
}

absl::StatusOr<double> LoadRate(const Subject& subject, Labels* labels) {
  const Stopwatch watch;
  const absl::StatusOr<std::unique_ptr<CheckpointReader>> reader =
      CheckpointReader::Open(subject.path);
  if (!reader.ok()) return reader.status();
  const absl::StatusOr<LoadReport> report = (*reader)->Load(subject.targets, {});
  const double seconds = watch.seconds();
  if (!report.ok()) return report.status();
  labels->engine = WordOf(report->engine);
  return static_cast<double>(report->bytes) / seconds;
}

}  // namespace

absl::Status RunRead(const Bench& bench) {
  const absl::StatusOr<Memory> memory = Memory::Make(bench.options.bytes, Pages::kHuge);
  if (!memory.ok()) return memory.status();
  FillWithNoise(*memory);
  absl::StatusOr<Subject> subject = Prepare(bench, *memory);
  if (!subject.ok()) return subject.status();

  std::vector<double> fio, raw, verify_rates, load_rates, verify_ratios, load_ratios;
  Labels verify_labels, load_labels;
  for (uint32_t round = 0; round < bench.options.pairs; ++round) {
    ShowStep(absl::StrCat("read: round ", round + 1, " of ", bench.options.pairs));
    double limit = 0;
    double verify_rate = 0;
    double load_rate = 0;
    constexpr uint32_t kTurns = 4;
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      switch ((turn + round) % kTurns) {
        case 0: {
          const absl::StatusOr<double> rate = FioRead(
              absl::StrCat(bench.scratch.path(), "/", subject->raw.name), subject->raw.bytes);
          if (rate.ok()) fio.push_back(*rate);
          limit = std::max(limit, rate.ok() ? *rate : 0);
          break;
        }
        case 1: {
          const absl::StatusOr<RawResult> result = RawRead(subject->raw);
          if (!result.ok()) return result.status();
          raw.push_back(static_cast<double>(subject->raw.bytes) / result->seconds);
          limit = std::max(limit, raw.back());
          break;
        }
        case 2: {
          const absl::StatusOr<double> rate = VerifyRate(*subject, &verify_labels);
          if (!rate.ok()) return rate.status();
          verify_rate = *rate;
          break;
        }
        default: {
          const absl::StatusOr<double> rate = LoadRate(*subject, &load_labels);
          if (!rate.ok()) return rate.status();
          load_rate = *rate;
          break;
        }
      }
    }
    verify_rates.push_back(verify_rate);
    load_rates.push_back(load_rate);
    verify_ratios.push_back(verify_rate / limit);
    load_ratios.push_back(load_rate / limit);
  }
  bench.figures.Add("verify.ratio_to_raw", "ratio", verify_ratios, verify_labels);
  bench.figures.Add("verify.bytes_per_second", "B/s", verify_rates, verify_labels);
  bench.figures.Add("load.ratio_to_raw", "ratio", load_ratios, load_labels);
  bench.figures.Add("load.bytes_per_second", "B/s", load_rates, load_labels);
  bench.figures.Add("raw.read_bytes_per_second.engine", "B/s", raw);
  bench.figures.Add("raw.read_bytes_per_second.fio", "B/s", fio);
  return absl::OkStatus();
}

}  // namespace holdfast::bench
