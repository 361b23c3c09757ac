// Proves a framework's commit file, in a directory owned by the framework.
#ifndef HOLDFAST_COMMIT_FILE_H_
#define HOLDFAST_COMMIT_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "holdfast/pod.h"

namespace holdfast {

/// The last file of a framework's save, which marks the checkpoint complete: `.metadata` of
/// PyTorch's distributed checkpoints.
struct CommitFile {
  std::string name;
  absl::string_view contents;
};

/// A commit record, ready to be written. runtime/layout/FORMAT.md describes it.
struct CommitRecordFile {
  std::string name;
  std::string text;
};

/// A save into a framework's directory.
struct FrameworkSave {
  AttemptId attempt;
  AttemptId parent;  ///< As SaveRequest::parent; zero: none is recorded.
  uint32_t world_size = 1;
};

/// Makes the commit record of a save with SaveRequest::files_only, when the manifests of all ranks
/// are durable in the directory `path`. The caller makes the record durable before the commit file
/// gets its name: from then on Verify proves the commit file and every manifest.
/// \error kNotFound (a rank's manifest), kDataLoss (damaged).
absl::StatusOr<CommitRecordFile> MakeCommitRecord(const std::string& path,
                                                  const FrameworkSave& save,
                                                  const CommitFile& file);

/// Compares a commit file that was read with the record of `attempt`. Returns the digests of the
/// manifests, by rank; nothing for a save of an earlier version, which made no record.
/// \error kDataLoss: the commit file or the record is damaged, or the record is missing.
absl::StatusOr<std::optional<std::vector<Digest>>> CheckCommitFile(const std::string& path,
                                                                   const AttemptId& attempt,
                                                                   const CommitFile& file);

}  // namespace holdfast

#endif  // HOLDFAST_COMMIT_FILE_H_
