// What is wrong with a checkpoint's files, and what that makes of it.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_FINDINGS_H_
#define HOLDFAST_RUNTIME_DIRECTORY_FINDINGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/verify.h"
#include "runtime/format/manifest.h"

namespace holdfast::directory {

/// A fault and what it makes of the checkpoint.
struct Finding {
  Verdict verdict = Verdict::kCorrupt;
  absl::StatusCode code = absl::StatusCode::kDataLoss;
  Fault fault;
  int error_number = 0;  ///< Of the system call that failed, if one did.
};

/// Something of the checkpoint is not there, or is another save's.
Finding Incomplete(const std::string& file, const char* reason, std::string expected,
                   std::string found);

/// Something is not as it was written.
Finding Corrupt(const std::string& file, const char* reason, std::string expected,
                std::string found);

/// What the status of reading `file` makes of it: its damage, or that it cannot be read.
Finding FindingOf(const absl::Status& status, const std::string& file, const char* reason);

/// What keeps one file from being the recorded one: not there, no file, of another size.
std::optional<Finding> CheckNamedFile(int directory, const std::string& name, uint64_t bytes);

/// CheckNamedFile of all files that a manifest names.
std::vector<Finding> CheckNamedFiles(int directory, const format::Manifest& manifest);

/// Corrupt before unreadable before incomplete before sound: proven damage is said first, then
/// what could not be judged.
Verdict Worse(Verdict a, Verdict b);

/// The gravest one; null if there is none.
const Finding* Gravest(const std::vector<Finding>& findings);

/// The gravest one as an error of opening `path`, which may be empty; OK if there is none.
absl::Status ToStatus(const std::vector<Finding>& findings, const std::string& path);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_FINDINGS_H_
