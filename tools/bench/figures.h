// Figures: named medians with their spread and what they were measured with.
#ifndef HOLDFAST_TOOLS_BENCH_FIGURES_H_
#define HOLDFAST_TOOLS_BENCH_FIGURES_H_

#include <map>
#include <string>
#include <vector>

#include "holdfast/save.h"

namespace holdfast::bench {

/// The middle of `values`; 0 for none.
double Median(std::vector<double> values);

/// What a figure was measured with.
struct Labels {
  std::string launcher;
  std::string engine;
  std::string pages;
};
Labels LabelsOf(const SaveReport& report);

/// \threadsafety One thread.
class Figures {
 public:
  /// A figure that was measured: all its samples.
  void Add(const std::string& key, const std::string& unit, const std::vector<double>& samples,
           const Labels& labels = {});

  /// One that could not be measured, and why. A figure that is there already stays.
  void AddMissing(const std::string& key, const std::string& reason);

  /// A fact about the machine or the run.
  void AddFact(const std::string& key, const std::string& value) { facts_[key] = value; }

  /// Every key that scripts rely on and that is not there yet is missing for `reason`.
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
