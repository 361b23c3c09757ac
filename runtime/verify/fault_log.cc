#include "runtime/verify/fault_log.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::verify {

void FaultLog::Add(Verdict verdict, Fault fault) {
  base::MutexLock lock(&mutex_);
  verdict_ = Worse(verdict_, verdict);
  ++total_;
  if (faults_.size() < faults_max_) faults_.push_back(std::move(fault));
}

bool FaultLog::empty() const {
  base::MutexLock lock(&mutex_);
  return total_ == 0;
}

void FaultLog::MoveTo(VerifyReport* report) {
  base::MutexLock lock(&mutex_);
  report->verdict = verdict_;
  report->faults_total = total_;
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
