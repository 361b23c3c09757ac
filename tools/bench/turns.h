// Ways to do the same work, measured in turn, and the ratios between them.
#ifndef HOLDFAST_TOOLS_BENCH_TURNS_H_
#define HOLDFAST_TOOLS_BENCH_TURNS_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/bench/bench.h"

namespace holdfast::bench {

/// One way, with the samples of its turns: sample n is of round n.
struct Way {
  std::string name;
  std::function<absl::Status(Way*)> turn;
  std::map<std::string, std::vector<double>> samples = {};
  Labels labels = {};
  absl::Status failure = {};

  void Note(const std::string& sample, double value) { samples[sample].push_back(value); }
  /// Empty if the way has failed.
  std::vector<double> Of(const std::string& sample) const;
};

/// Gives each way one turn in each of `pairs` rounds. Each round begins with another way, so that
/// drift of a shared disk meets all ways. A way that fails gets no further turn.
void TakeTurns(const Bench& bench, const std::string& section, std::vector<Way>* ways);

/// Returns the ratio of each round that both sides have. `Better` with an empty side returns the
/// other side.
std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b);
std::vector<double> Better(const std::vector<double>& a, const std::vector<double>& b);

/// Adds one kind of sample of `way` as figure `key`; adds a missing figure with the reason if the
/// way failed.
void AddFigure(const Bench& bench, const std::string& key, const std::string& unit, const Way& way,
               const std::string& sample);
/// The same as a ratio to `limit`.
void AddRatio(const Bench& bench, const std::string& key, const Way& way, const std::string& sample,
              const std::vector<double>& limit);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_TURNS_H_
