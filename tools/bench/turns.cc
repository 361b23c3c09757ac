#include "tools/bench/turns.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace holdfast::bench {

std::vector<double> Way::Of(const std::string& sample) const {
  const auto found = samples.find(sample);
  return failure.ok() && found != samples.end() ? found->second : std::vector<double>();
}

void TakeTurns(const Bench& bench, const std::string& section, std::vector<Way>* ways) {
  for (uint32_t round = 0; round < bench.options.pairs; ++round) {
    for (size_t i = 0; i < ways->size(); ++i) {
      Way& way = (*ways)[(i + round) % ways->size()];
      // A way that has failed would fail in the next round too.
      if (!way.failure.ok()) continue;
      ShowStep(absl::StrCat(section, ": round ", round + 1, " of ", bench.options.pairs, ": ",
                            way.name));
      way.failure = way.turn(&way);
    }
  }
}

std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  return ratios;
}

std::vector<double> Better(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  std::vector<double> better;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) better.push_back(std::max(a[i], b[i]));
  return better;
}

void AddFigure(const Bench& bench, const std::string& key, const std::string& unit, const Way& way,
               const std::string& sample) {
  if (!way.failure.ok()) return bench.figures.AddMissing(key, way.failure.ToString());
  bench.figures.Add(key, unit, way.Of(sample), way.labels);
}

void AddRatio(const Bench& bench, const std::string& key, const Way& way, const std::string& sample,
              const std::vector<double>& limit) {
  if (!way.failure.ok()) return bench.figures.AddMissing(key, way.failure.ToString());
  bench.figures.Add(key, "ratio", Ratios(way.Of(sample), limit), way.labels);
}

}  // namespace holdfast::bench
