// Collects findings while several threads check a checkpoint.
#ifndef HOLDFAST_RUNTIME_VERIFY_FAULT_LOG_H_
#define HOLDFAST_RUNTIME_VERIFY_FAULT_LOG_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/verify.h"
#include "runtime/base/mutex.h"
#include "runtime/directory/findings.h"

namespace holdfast::verify {

/// Keeps a bounded number of faults and counts the rest. \threadsafety Any thread.
class FaultLog {
 public:
  explicit FaultLog(uint64_t faults_max) : faults_max_(faults_max) {}

  void Add(Verdict verdict, Fault fault) ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(const directory::Finding& finding) { Add(finding.verdict, finding.fault); }

  bool empty() const ABSL_LOCKS_EXCLUDED(mutex_);

  /// True when something was found in `file`.
  bool Has(const std::string& file) const ABSL_LOCKS_EXCLUDED(mutex_);

  /// Drops what was found in `file`.
  void Forget(const std::string& file) ABSL_LOCKS_EXCLUDED(mutex_);

  /// Moves the faults, sorted by file and offset, and the worst verdict into `report`. Ends the
  /// log.
  void MoveTo(VerifyReport* report) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Tally {
    Verdict verdict = Verdict::kSound;
    uint64_t total = 0;
  };

  const uint64_t faults_max_;
  mutable base::Mutex mutex_;
  std::map<std::string, Tally> tallies_ ABSL_GUARDED_BY(mutex_);  // by file
  std::vector<Fault> faults_ ABSL_GUARDED_BY(mutex_);
};

/// Appends a sentence to the report's note.
void AddNote(const std::string& sentence, VerifyReport* report);

/// Returns the first few of `names`, and the number of further names.
std::string Enumerate(const std::vector<std::string>& names);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_FAULT_LOG_H_
