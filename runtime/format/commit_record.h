// The commit record: what rank 0 adds to a checkpoint, so that one small file says what it is.
//
// Built by the trainer as a template with fixed-width slots; rank 0's worker fills them before the
// rename that commits. In a directory that a framework owns, the trainer fills them, and the record
// proves the framework's own last file. Described byte by byte in runtime/layout/FORMAT.md.
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

/// The file by which a framework commits, as it was written.
struct CommitFileDigest {
  std::string name;
  uint64_t bytes = 0;
  Digest digest;
};

/// What the template is made from.
struct CommitInput {
  std::string checkpoint;  ///< Its final directory name.
  AttemptId attempt;
  AttemptId parent;  ///< The checkpoint that this run saved before or resumed from; none: zero.
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint64_t saved_at_ns = 0;
  std::optional<CommitFileDigest> commit_file = std::nullopt;  ///< Where a framework commits.
};

struct CommitTemplate {
  std::string text;  ///< As long as the file will be; empty: no record is written.
  layout::CommitSlots slots;
};

CommitTemplate BuildCommitRecord(const CommitInput& input);

/// A record that was read.
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

/// A record with all slots filled. `bytes`: of all ranks' files; `manifests`: one for each rank.
std::string CompleteCommitRecord(const CommitInput& input, uint64_t committed_at_ns, uint64_t bytes,
                                 absl::Span<const CommitRecord::RankManifest> manifests);

/// Reads and checks a record: the self-digest over the raw bytes first, then strict JSON, then
/// meaning: as many rows as ranks. \error kDataLoss saying where and why.
absl::StatusOr<CommitRecord> ParseCommitRecord(absl::string_view text);

/// Largest record that is read, in bytes: 100,000 ranks.
inline constexpr uint64_t kCommitRecordBytesMax = uint64_t{16} << 20;

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_COMMIT_RECORD_H_
