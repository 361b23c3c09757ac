// Faults of a checkpoint's files, and the verdict that follows.
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

/// A fault and the resulting verdict on the checkpoint.
struct Finding {
  Verdict verdict = Verdict::kCorrupt;
  absl::StatusCode code = absl::StatusCode::kDataLoss;
  Fault fault;
  int error_number = 0;  ///< Of the failed system call, if any.
};

/// A part of the checkpoint is missing, or is another save's.
Finding Incomplete(const std::string& file, const char* reason, std::string expected,
                   std::string found);

/// A part of the checkpoint differs from the written one.
Finding Corrupt(const std::string& file, const char* reason, std::string expected,
                std::string found);

/// The finding for a failed read of `file`: damaged, or unreadable.
Finding FindingOf(const absl::Status& status, const std::string& file, const char* reason);

/// Checks that the entry is a regular file of the recorded size. Returns the finding otherwise.
std::optional<Finding> CheckNamedFile(int directory, const std::string& name, uint64_t bytes);

/// CheckNamedFile for all files of a manifest.
std::vector<Finding> CheckNamedFiles(int directory, const format::Manifest& manifest);

/// Returns the gravest finding; null for an empty list.
const Finding* Gravest(const std::vector<Finding>& findings);

/// Returns the gravest finding as an error of opening `path`, which may be empty; OK for an empty
/// list.
absl::Status ToStatus(const std::vector<Finding>& findings, const std::string& path);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_FINDINGS_H_
