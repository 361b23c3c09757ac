// Writing against the disk's limit.
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/bench/limits.h"
#include "tools/bench/workload.h"

namespace holdfast::bench {
namespace {

struct Rung {
  const char* name;
  EngineRung engine;
};
constexpr Rung kRungs[] = {{"fixed", EngineRung::kUringFixed},
                           {"plain", EngineRung::kUring},
                           {"pwrite", EngineRung::kPwrite}};

absl::Status Save(const Bench& bench, const std::vector<TensorSource>& tensors, EngineRung engine,
                  Way* way) {
  CheckpointerOptions options =
      OptionsFor(bench, DefaultArenaBytes({.state_bytes = bench.options.bytes}));
  options.engine = engine;
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(options);
  if (!checkpointer.ok()) return checkpointer.status();
  const absl::StatusOr<SaveCost> cost = MeasureSave(checkpointer->get(), "save", tensors);
  if (!cost.ok()) return cost.status();
  const auto bytes = static_cast<double>(cost->report.bytes);
  way->labels = LabelsOf(cost->report);
  way->Note("rate", bytes / cost->write_seconds());
  way->Note("rate_from_call", bytes / cost->report.time_to_durable);
  way->Note("worker_cpu", cost->worker_cpu / cost->gib());
  way->Note("total_cpu", cost->total_cpu / cost->gib());
  way->Note("seal_cpu", cost->report.cpu_sealing / cost->gib());
  way->Note("private", static_cast<double>(cost->report.worker_private_bytes_peak));
  return absl::OkStatus();
}

/// fio, buffered, then the raw engine and the save of each rung.
std::vector<Way> MakeWays(const Bench& bench, const std::vector<TensorSource>& tensors) {
  const LimitFile file = {.name = "limit", .bytes = bench.options.bytes};
  std::vector<Way> ways;
  const auto add = [&](const std::string& name, std::function<absl::Status(Way*)> turn) {
    ways.push_back({name, [&bench, turn = std::move(turn)](Way* way) {
                      const absl::Status status = turn(way);
                      bench.scratch.Empty();
                      return status;
                    }});
  };
  add("fio", [&bench, file](Way* way) { return FioWrite(bench, file, way); });
  add("buffered", [&bench, file](Way* way) { return BufferedWrite(bench, file, way); });
  for (const Rung& rung : kRungs) {
    add(absl::StrCat("raw.", rung.name),
        [&bench, file, rung](Way* way) { return RawWrite(bench, file, rung.engine, way); });
    add(rung.name,
        [&bench, &tensors, rung](Way* way) { return Save(bench, tensors, rung.engine, way); });
  }
  return ways;
}

void AddRung(const Bench& bench, const Way& fio, const Way& raw, const Way& save) {
  const auto key = [&save](const char* figure) { return absl::StrCat(figure, ".", save.name); };
  const std::vector<double> limit = Better(fio.Of("rate"), raw.Of("rate"));
  AddRatio(bench, key("write.ratio_to_raw"), save, "rate", limit);
  AddRatio(bench, key("write.ratio_to_raw_from_call"), save, "rate_from_call", limit);
  AddFigure(bench, key("write.bytes_per_second"), "B/s", save, "rate");
  AddFigure(bench, key("write.worker_cpu_seconds_per_gib"), "s/GiB", save, "worker_cpu");
  AddFigure(bench, key("write.total_cpu_seconds_per_gib"), "s/GiB", save, "total_cpu");
  AddFigure(bench, key("raw.write_bytes_per_second"), "B/s", raw, "rate");
  AddFigure(bench, key("raw.cpu_seconds_per_gib"), "s/GiB", raw, "cpu");
}

}  // namespace

absl::Status RunWrite(const Bench& bench) {
  const absl::StatusOr<Memory> memory = Memory::MakeNoise(bench.options.bytes);
  if (!memory.ok()) return memory.status();
  const std::vector<TensorSource> tensors = memory->CutTensors(kTensors);
  std::vector<Way> ways = MakeWays(bench, tensors);
  TakeTurns(bench, "write", &ways);
  const Way& fio = ways[0];
  Way& buffered = ways[1];
  const Way* best = nullptr;  // The rung that a save selects by default.
  for (size_t i = 2; i + 1 < ways.size(); i += 2) {
    AddRung(bench, fio, ways[i], ways[i + 1]);
    if (best == nullptr && ways[i + 1].failure.ok()) best = &ways[i + 1];
  }
  if (best != nullptr) {
    AddFigure(bench, "worker.cpu_seconds_per_gib", "s/GiB", *best, "worker_cpu");
    AddFigure(bench, "total.cpu_seconds_per_gib", "s/GiB", *best, "total_cpu");
    AddFigure(bench, "seal.cpu_seconds_per_gib", "s/GiB", *best, "seal_cpu");
    AddFigure(bench, "worker.private_bytes", "B", *best, "private");
  }
  AddFigure(bench, "raw.write_bytes_per_second.fio", "B/s", fio, "rate");
  for (const double rate : buffered.Of("rate")) buffered.Note("seconds", kGib / rate);
  AddFigure(bench, "buffered.write_fsync_seconds_per_gib", "s/GiB", buffered, "seconds");
  AddFigure(bench, "buffered.cpu_seconds_per_gib", "s/GiB", buffered, "cpu");
  AddRatio(bench, "buffered.ratio_to_raw", buffered, "rate",
           Better(fio.Of("rate"), ways[2].Of("rate")));
  return absl::OkStatus();
}

}  // namespace holdfast::bench
