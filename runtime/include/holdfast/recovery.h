// After a crash: which checkpoint is the newest complete one, what can be promoted, what must go.
#ifndef HOLDFAST_RECOVERY_H_
#define HOLDFAST_RECOVERY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/checkpointer.h"
#include "holdfast/pod.h"

namespace holdfast {

/// A complete checkpoint: it stands under its final name, the manifests of all ranks of one attempt
/// are there and sound, and every file that they name has exactly the recorded size.
struct CheckpointInfo {
  std::string name;  ///< Below the directory.
  std::string path;
  uint64_t step = 0;
  /// The call of its save, by rank 0's clock; where that is not recorded, when it was written.
  absl::Time saved_at;
  AttemptId attempt;
  AttemptId parent;  ///< As SaveRequest::parent; zero: none, or not recorded.
  uint32_t world_size = 1;
  uint64_t bytes = 0;  ///< Of all ranks' files.
};

struct RecoveryOptions {
  /// A worker of a dead trainer may still be finishing: wait this long for it, then fence it (its
  /// directory is renamed away, so that its own last rename fails).
  absl::Duration wait_for_orphans = absl::Seconds(30);
  bool promote =
      true;  ///< Give complete partial checkpoints without a living owner their final name.
  bool clean_up = true;  ///< Remove incomplete partial ones without a living owner.
  /// Where locks do not tell who is at work (network file systems): a complete partial checkpoint
  /// is promoted once nothing in it has changed for this long, by the file system's clock. Recovery
  /// waits for that, unless `wait_for_orphans` is zero. Ranks that live change a file of theirs
  /// every ten seconds; a client's cache of file times may be a minute old.
  absl::Duration silence_without_locks = absl::Minutes(2);
  /// The same for what is incomplete, which is then removed. Zero: the caller knows that no save
  /// runs.
  absl::Duration age_without_locks = absl::Hours(24);
};

struct RecoveryReport {
  std::vector<CheckpointInfo> complete;      ///< As ListCheckpoints.
  std::vector<std::string> promoted;         ///< Names.
  std::vector<std::string> removed;          ///< Partial, fenced and retired directories.
  std::vector<std::string> fenced;           ///< Their new names.
  std::vector<std::string> kept_incomplete;  ///< Not complete, left alone, with the reason.
};

/// Makes the directory clean after a crash and tells what is there. Safe against running saves of
/// any process: those hold locks on their partial directory. Recoveries of one directory, by
/// several ranks say, take turns. Repeating it is harmless, also after it was killed half-way.
/// \error kNotFound (directory), kDeadlineExceeded (another recovery does not end), and what fsync
/// of the directory says: then nothing was proven durable. What goes wrong with a single partial
/// directory is told in `kept_incomplete`.
absl::StatusOr<RecoveryReport> Recover(const std::string& directory,
                                       const RecoveryOptions& options);

/// Complete checkpoints of a directory by the time of their saves, newest last; changes nothing.
/// Neither step nor name counts: after a rollback the newest has a lower step than others. Of a
/// checkpoint with a commit record that record alone is read, whatever the number of ranks. A
/// checkpoint that cannot be read, or is not complete, is passed over: `passed_over`, if not null,
/// gets "NAME: why".
/// \error what reading says, when no checkpoint is complete and at least one cannot be read.
absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(
    const std::string& directory, std::vector<std::string>* passed_over = nullptr);

/// The newest complete checkpoint, as ListCheckpoints has it, and held against its files: where one
/// has gone or shrunk since the commit, the next one is the newest.
/// \error kNotFound when there is none.
absl::StatusOr<CheckpointInfo> FindNewest(const std::string& directory,
                                          std::vector<std::string>* passed_over = nullptr);

/// Whether `path` is a complete checkpoint; kNotFound, kDataLoss (manifest does not parse) or
/// kFailedPrecondition (incomplete) otherwise, with the reason.
absl::StatusOr<CheckpointInfo> InspectCheckpoint(const std::string& path);

/// Names that `retention` removes once `saved` is durable, oldest first: of the series of `saved`,
/// and never `saved` itself.
std::vector<std::string> SelectForRemoval(const std::vector<CheckpointInfo>& complete,
                                          const Retention& retention, const std::string& saved);

}  // namespace holdfast

#endif  // HOLDFAST_RECOVERY_H_
