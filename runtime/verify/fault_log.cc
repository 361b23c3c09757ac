#include "runtime/verify/fault_log.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::verify {

void FaultLog::Add(Verdict verdict, Fault fault) {
  base::MutexLock lock(&mutex_);
  Tally& tally = tallies_[fault.file];
  tally.verdict = Worse(tally.verdict, verdict);
  ++tally.total;
  if (faults_.size() < faults_max_) faults_.push_back(std::move(fault));
}

bool FaultLog::empty() const {
  base::MutexLock lock(&mutex_);
  return tallies_.empty();
}

bool FaultLog::Has(const std::string& file) const {
  base::MutexLock lock(&mutex_);
  return tallies_.count(file) != 0;
}

void FaultLog::Forget(const std::string& file) {
  base::MutexLock lock(&mutex_);
  tallies_.erase(file);
  std::erase_if(faults_, [&file](const Fault& fault) { return fault.file == file; });
}

void FaultLog::MoveTo(VerifyReport* report) {
  base::MutexLock lock(&mutex_);
  report->verdict = Verdict::kSound;
  report->faults_total = 0;
  for (const auto& [file, tally] : tallies_) {
    report->verdict = Worse(report->verdict, tally.verdict);
    report->faults_total += tally.total;
  }
  report->faults = std::move(faults_);
  // Threads finish in any order; the report has a fixed order.
  std::stable_sort(report->faults.begin(), report->faults.end(),
                   [](const Fault& a, const Fault& b) {
                     return std::tie(a.file, a.begin, a.end, a.tensor) <
                            std::tie(b.file, b.begin, b.end, b.tensor);
                   });
}

void AddNote(const std::string& sentence, VerifyReport* report) {
  absl::StrAppend(&report->note, report->note.empty() ? "" : " ", sentence);
}

std::string Enumerate(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", names[i]);
  }
  if (names.size() > kShown) absl::StrAppend(&text, " and ", names.size() - kShown, " more");
  return text;
}

}  // namespace holdfast::verify
