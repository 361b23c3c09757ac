// The commit record: rank 0's summary of a checkpoint in one small file.
//
// The trainer builds a template with fixed-width slots; rank 0's worker fills the slots before the
// rename that commits. In a directory that a framework owns, the trainer fills the slots, and the
// record proves the framework's own last file. Described byte by byte in runtime/layout/FORMAT.md.
#ifndef HOLDFAST_RUNTIME_FORMAT_COMMIT_RECORD_H_
#define HOLDFAST_RUNTIME_FORMAT_COMMIT_RECORD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::format {

/// Name, size and digest of the file by which a framework commits.
struct CommitFileDigest {
  std::string name;
  uint64_t bytes = 0;
  Digest digest;
};

/// The input of the template.
struct CommitInput {
  std::string checkpoint;  ///< The final directory name.
  AttemptId attempt;
  /// The checkpoint that this run saved before or resumed from; zero: no parent.
  AttemptId parent;
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint64_t saved_at_ns = 0;
  std::optional<CommitFileDigest> commit_file = std::nullopt;  ///< Where a framework commits.
};

struct CommitTemplate {
  std::string text;  ///< As long as the final file; empty: no record is written.
  layout::CommitSlots slots;
};

CommitTemplate BuildCommitRecord(const CommitInput& input);

/// A parsed record.
struct CommitRecord {
  struct RankManifest {
    uint64_t bytes = 0;
    Digest digest;
  };
  std::string checkpoint;
  std::string series;
  AttemptId attempt;
  AttemptId parent;
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint64_t saved_at_ns = 0;
  uint64_t committed_at_ns = 0;
  uint64_t bytes = 0;                                          ///< Of all ranks' files.
  std::optional<CommitFileDigest> commit_file = std::nullopt;  ///< Where a framework commits.
  std::vector<RankManifest> manifests;                         ///< By rank.
};

/// Builds a record with all slots filled. `bytes`: of all ranks' files; `manifests`: one for each
/// rank.
std::string CompleteCommitRecord(const CommitInput& input, uint64_t committed_at_ns, uint64_t bytes,
                                 absl::Span<const CommitRecord::RankManifest> manifests);

/// Reads and checks a record: the self-digest over the raw bytes, then strict JSON, then the
/// meaning: as many rows as ranks. \error kDataLoss with place and cause.
absl::StatusOr<CommitRecord> ParseCommitRecord(absl::string_view text);

/// Largest record that is read, in bytes. A record of 99,999 ranks, the most that a save may have,
/// has half as many.
inline constexpr uint64_t kCommitRecordBytesMax = uint64_t{16} << 20;

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_COMMIT_RECORD_H_
