// Figures: named medians with their spread and their labels.
#ifndef HOLDFAST_TOOLS_BENCH_FIGURES_H_
#define HOLDFAST_TOOLS_BENCH_FIGURES_H_

#include <map>
#include <string>
#include <vector>

#include "holdfast/save.h"

namespace holdfast::bench {

/// Returns the median of `values`; 0 for an empty vector.
double Median(std::vector<double> values);

/// The conditions of a figure's measurement.
struct Labels {
  std::string launcher;
  std::string engine;
  std::string pages;
};
Labels LabelsOf(const SaveReport& report);

/// \threadsafety One thread.
class Figures {
 public:
  /// Adds a measured figure with all samples.
  void Add(const std::string& key, const std::string& unit, const std::vector<double>& samples,
           const Labels& labels = {});

  /// Adds a figure that could not be measured, with the reason. An existing figure stays.
  void AddMissing(const std::string& key, const std::string& reason);

  /// A fact about the machine or the run.
  void AddFact(const std::string& key, const std::string& value) { facts_[key] = value; }

  /// Adds every absent stable key as missing for `reason`.
  void FillMissing(const std::string& reason);

  std::string Json() const;
  std::string Table() const;

 private:
  struct Figure {
    std::string unit;
    std::vector<double> samples;
    Labels labels;
    std::string missing;
  };
  std::map<std::string, Figure> figures_;
  std::map<std::string, std::string> facts_;
};

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_FIGURES_H_
