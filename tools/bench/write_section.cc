// Writing against the disk's limit. In every round each way to write gets one turn, and the round
// begins with another one each time.
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/bench/fio.h"
#include "tools/bench/memory.h"
#include "tools/bench/one_save.h"
#include "tools/bench/raw_io.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {
namespace {

struct Rung {
  const char* name;
  EngineRung engine;
};
constexpr Rung kRungs[] = {{"fixed", EngineRung::kUringFixed},
                           {"plain", EngineRung::kUring},
                           {"pwrite", EngineRung::kPwrite}};
constexpr uint32_t kTensors = 64;

/// One way to write, with the figures of its turns. Turn n is of round n unless it failed.
struct Way {
  std::string name;
  std::function<absl::Status(Way*)> turn;
  std::map<std::string, std::vector<double>> figures = {};
  Labels labels = {};
  std::string failure = "";

  void Note(const std::string& figure, double value) { figures[figure].push_back(value); }
};

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

absl::Status NoteRaw(const absl::StatusOr<RawResult>& result, uint64_t bytes, Way* way) {
  if (!result.ok()) return result.status();
  const auto written = static_cast<double>(bytes);
  way->Note("rate", written / result->seconds);
  way->Note("cpu", result->cpu_seconds / (written / kGib));
  return absl::OkStatus();
}

std::vector<Way> MakeWays(const Bench& bench, const std::vector<TensorSource>& tensors) {
  const RawRequest raw = {
      .directory = bench.scratch.fd(), .name = "raw", .bytes = bench.options.bytes};
  std::vector<Way> ways;
  ways.push_back({"fio", [&bench](Way* way) {
                    const absl::StatusOr<double> rate =
                        FioWrite(absl::StrCat(bench.scratch.path(), "/fio"), bench.options.bytes);
                    if (rate.ok()) way->Note("rate", *rate);
                    return rate.status();
                  }});
  ways.push_back(
      {"buffered", [raw](Way* way) { return NoteRaw(BufferedWrite(raw), raw.bytes, way); }});
  for (const Rung& rung : kRungs) {
    RawRequest request = raw;
    request.engine = rung.engine;
    ways.push_back({absl::StrCat("raw.", rung.name), [request](Way* way) {
                      return NoteRaw(RawWrite(request), request.bytes, way);
                    }});
    ways.push_back({rung.name, [&bench, &tensors, rung](Way* way) {
                      return Save(bench, tensors, rung.engine, way);
                    }});
  }
  return ways;
}

void Measure(const Bench& bench, std::vector<Way>* ways) {
  for (uint32_t round = 0; round < bench.options.pairs; ++round) {
    for (size_t i = 0; i < ways->size(); ++i) {
      Way& way = (*ways)[(i + round) % ways->size()];
      if (!way.failure.empty()) continue;
      ShowStep(
          absl::StrCat("write: round ", round + 1, " of ", bench.options.pairs, ": ", way.name));
      const absl::Status status = way.turn(&way);
      // What does not work here does not work in the next round either.
      if (!status.ok()) way.failure = status.ToString();
      bench.scratch.Empty();
    }
  }
}

/// The better of fio and the same engine without digests, round by round; the rounds that both
/// sides of a ratio have.
std::vector<double> Limit(const Way& fio, const Way& raw) {
  const auto rates = [](const Way& way) -> std::vector<double> {
    const auto found = way.figures.find("rate");
    return way.failure.empty() && found != way.figures.end() ? found->second
                                                             : std::vector<double>();
  };
  const std::vector<double> a = rates(fio);
  const std::vector<double> b = rates(raw);
  if (a.empty()) return b;
  if (b.empty()) return a;
  std::vector<double> best;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) best.push_back(std::max(a[i], b[i]));
  return best;
}

std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  return ratios;
}

void AddRung(const Bench& bench, const Way& fio, const Way& raw, const Way& save) {
  Figures& figures = bench.figures;
  const std::string ratio = absl::StrCat("write.ratio_to_raw.", save.name);
  if (!raw.failure.empty())
    figures.AddMissing("raw.write_bytes_per_second." + save.name, raw.failure);
  if (!save.failure.empty()) return figures.AddMissing(ratio, save.failure);
  const std::vector<double> limit = Limit(fio, raw);
  const auto of = [&save](const char* figure) { return save.figures.at(figure); };
  figures.Add(ratio, "ratio", Ratios(of("rate"), limit), save.labels);
  figures.Add(absl::StrCat("write.ratio_to_raw_from_call.", save.name), "ratio",
              Ratios(of("rate_from_call"), limit), save.labels);
  figures.Add(absl::StrCat("write.bytes_per_second.", save.name), "B/s", of("rate"), save.labels);
  figures.Add(absl::StrCat("write.worker_cpu_seconds_per_gib.", save.name), "s/GiB",
              of("worker_cpu"), save.labels);
  figures.Add(absl::StrCat("write.total_cpu_seconds_per_gib.", save.name), "s/GiB", of("total_cpu"),
              save.labels);
  if (raw.failure.empty()) {
    figures.Add(absl::StrCat("raw.write_bytes_per_second.", save.name), "B/s",
                raw.figures.at("rate"));
    figures.Add(absl::StrCat("raw.cpu_seconds_per_gib.", save.name), "s/GiB",
                raw.figures.at("cpu"));
  }
}

/// The CPU figures are those of the best rung that works here: the one that a save takes by itself.
void AddCpu(const Bench& bench, const std::vector<const Way*>& saves) {
  for (const Way* save : saves) {
    if (!save->failure.empty()) continue;
    bench.figures.Add("worker.cpu_seconds_per_gib", "s/GiB", save->figures.at("worker_cpu"),
                      save->labels);
    bench.figures.Add("total.cpu_seconds_per_gib", "s/GiB", save->figures.at("total_cpu"),
                      save->labels);
    bench.figures.Add("seal.cpu_seconds_per_gib", "s/GiB", save->figures.at("seal_cpu"),
                      save->labels);
    bench.figures.Add("worker.private_bytes", "B", save->figures.at("private"), save->labels);
    return;
  }
}

void AddBaselines(const Bench& bench, const Way& fio, const Way& buffered, const Way& raw) {
  if (fio.failure.empty()) {
    bench.figures.Add("raw.write_bytes_per_second.fio", "B/s", fio.figures.at("rate"));
  } else {
    bench.figures.AddMissing("raw.write_bytes_per_second.fio", fio.failure);
  }
  if (!buffered.failure.empty()) {
    return bench.figures.AddMissing("buffered.write_fsync_seconds_per_gib", buffered.failure);
  }
  std::vector<double> seconds;
  for (const double rate : buffered.figures.at("rate")) seconds.push_back(kGib / rate);
  bench.figures.Add("buffered.write_fsync_seconds_per_gib", "s/GiB", seconds);
  bench.figures.Add("buffered.cpu_seconds_per_gib", "s/GiB", buffered.figures.at("cpu"));
  bench.figures.Add("buffered.ratio_to_raw", "ratio",
                    Ratios(buffered.figures.at("rate"), Limit(fio, raw)));
}

}  // namespace

absl::Status RunWrite(const Bench& bench) {
  const absl::StatusOr<Memory> memory = Memory::Make(bench.options.bytes, Pages::kHuge);
  if (!memory.ok()) return memory.status();
  FillWithNoise(*memory);
  const std::vector<TensorSource> tensors = CutTensors(*memory, kTensors);
  std::vector<Way> ways = MakeWays(bench, tensors);
  Measure(bench, &ways);
  // The order of MakeWays: fio, buffered, then raw and save of each rung.
  std::vector<const Way*> saves;
  for (size_t i = 2; i + 1 < ways.size(); i += 2) {
    AddRung(bench, ways[0], ways[i], ways[i + 1]);
    saves.push_back(&ways[i + 1]);
  }
  AddCpu(bench, saves);
  AddBaselines(bench, ways[0], ways[1], ways[2]);
  return absl::OkStatus();
}

}  // namespace holdfast::bench
