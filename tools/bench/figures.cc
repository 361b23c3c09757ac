#include "tools/bench/figures.h"
#include "holdfast/pod.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"

namespace holdfast::bench {
namespace {

/// Every document has these keys, because scripts rely on them.
constexpr const char* kStableKeys[] = {
    "write.ratio_to_raw.fixed",
    "write.ratio_to_raw.plain",
    "write.ratio_to_raw.pwrite",
    "worker.cpu_seconds_per_gib",
    "total.cpu_seconds_per_gib",
    "copy.ratio_to_memcpy.plain",
    "copy.ratio_to_memcpy.fused",
    "handoff.median_us.spawn",
    "handoff.median_us.fork",
    "handoff.median_us.persistent",
    "handoff.median_us.thread",
    "handoff.median_us.device",
    "handoff.growth_ratio.spawn",
    "handoff.growth_ratio.fork",
    "handoff.growth_ratio.persistent",
    "handoff.growth_ratio.thread",
    "verify.ratio_to_raw",
    "load.ratio_to_raw",
    "worker.private_bytes",
    "arena.bytes_peak",
    "arena.bytes_cap",
    "buffered.write_fsync_seconds_per_gib",
    "buffered.ratio_to_raw",
};

std::string NumberText(double value) {
  constexpr double kManyDigits = 1e4;  // From here on whole numbers are easier to read.
  return value >= kManyDigits ? absl::StrFormat("%.0f", value) : absl::StrFormat("%.4g", value);
}

std::string Join(const Labels& labels) {
  std::string out;
  for (const std::string* part : {&labels.launcher, &labels.engine, &labels.pages}) {
    if (part->empty()) continue;
    out += (out.empty() ? "" : ", ") + *part;
  }
  return out;
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 != 0 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Labels LabelsOf(const SaveReport& report) {
  return {.launcher = WordOf(report.launcher),
          .engine = WordOf(report.engine),
          .pages = WordOf(report.pages)};
}

void Figures::Add(const std::string& key, const std::string& unit,
                  const std::vector<double>& samples, const Labels& labels) {
  if (samples.empty()) return AddMissing(key, "no sample");
  figures_[key] = {.unit = unit, .samples = samples, .labels = labels, .missing = ""};
}

void Figures::AddMissing(const std::string& key, const std::string& reason) {
  figures_.insert({key, {.unit = "", .samples = {}, .labels = {}, .missing = reason}});
}

void Figures::FillMissing(const std::string& reason) {
  for (const char* key : kStableKeys) AddMissing(key, reason);
}

std::string Figures::Json() const {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [key, value] : facts_) json[key] = value;
  for (const auto& [key, figure] : figures_) {
    if (figure.samples.empty()) {
      json[key] = nullptr;
      json[key + ".reason"] = figure.missing;
      continue;
    }
    const auto [least, most] = std::minmax_element(figure.samples.begin(), figure.samples.end());
    json[key] = Median(figure.samples);
    json[key + ".min"] = *least;
    json[key + ".max"] = *most;
    json[key + ".samples"] = figure.samples.size();
    json[key + ".unit"] = figure.unit;
    if (!figure.labels.launcher.empty()) json[key + ".launcher"] = figure.labels.launcher;
    if (!figure.labels.engine.empty()) json[key + ".engine"] = figure.labels.engine;
    if (!figure.labels.pages.empty()) json[key + ".pages"] = figure.labels.pages;
  }
  constexpr int kIndent = 2;
  return json.dump(kIndent, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string Figures::Table() const {
  std::string out;
  for (const auto& [key, value] : facts_) absl::StrAppendFormat(&out, "%-24s %s\n", key, value);
  absl::StrAppendFormat(&out, "\n%-44s %12s %12s %12s %4s  %-8s %s\n", "figure", "median", "min",
                        "max", "n", "unit", "with");
  for (const auto& [key, figure] : figures_) {
    if (figure.samples.empty()) {
      absl::StrAppendFormat(&out, "%-44s %12s   %s\n", key, "-", figure.missing);
      continue;
    }
    const auto [least, most] = std::minmax_element(figure.samples.begin(), figure.samples.end());
    absl::StrAppendFormat(&out, "%-44s %12s %12s %12s %4d  %-8s %s\n", key,
                          NumberText(Median(figure.samples)), NumberText(*least), NumberText(*most),
                          figure.samples.size(), figure.unit, Join(figure.labels));
  }
  return out;
}

}  // namespace holdfast::bench
