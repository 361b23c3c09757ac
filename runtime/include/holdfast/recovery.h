// Finds, promotes and removes checkpoints after a crash.
#ifndef HOLDFAST_RECOVERY_H_
#define HOLDFAST_RECOVERY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/checkpointer.h"
#include "holdfast/pod.h"

namespace holdfast {

/// A complete checkpoint: the directory has its final name, the manifests of all ranks of one
/// attempt are present and sound, and every file named in a manifest has exactly the recorded size.
struct CheckpointInfo {
  std::string name;  ///< Directory name below the parent.
  std::string path;
  uint64_t step = 0;
  /// Time of the SaveAsync call by rank 0's clock, moved behind the newest earlier checkpoint where
  /// the clock stands before it; time of the write where the call is not recorded.
  absl::Time saved_at;
  AttemptId attempt;
  AttemptId parent;  ///< As SaveRequest::parent; zero: none or not recorded.
  uint32_t world_size = 1;
  uint64_t bytes = 0;  ///< Of all ranks' files.
};

struct RecoveryOptions {
  /// Longest wait without progress for a worker of a dead trainer that may still finish; the whole
  /// wait lasts ten times as long. After the wait its directory is renamed away (fenced), so that
  /// the worker's last rename fails. For a file that is saved by itself, the longest wait for any
  /// process that has it open: its trainer may live.
  absl::Duration wait_for_orphans = absl::Seconds(30);
  /// Rename complete partial checkpoints without a live owner to their final name.
  bool promote = true;
  bool clean_up = true;  ///< Remove incomplete partial checkpoints without a live owner.
  /// On network file systems locks do not show a running save. A complete partial checkpoint is
  /// promoted once its files have not changed for this long, by the file system's clock. Recovery
  /// waits for the silence, unless `wait_for_orphans` is zero. A live rank changes its file every
  /// ten seconds; a client's cache of file times may be a minute old.
  absl::Duration silence_without_locks = absl::Minutes(2);
  /// The same for an incomplete partial checkpoint, which is then removed. Zero: the caller
  /// guarantees that no save runs.
  absl::Duration age_without_locks = absl::Hours(24);
};

struct RecoveryReport {
  std::vector<CheckpointInfo> complete;      ///< As ListCheckpoints.
  std::vector<std::string> promoted;         ///< Final names.
  std::vector<std::string> removed;          ///< Partial, fenced and retired directories.
  std::vector<std::string> fenced;           ///< Their new names.
  std::vector<std::string> kept_incomplete;  ///< Incomplete and kept, with the reason.
};

/// Cleans the directory after a crash and reports its checkpoints. Safe beside running saves of any
/// process, which hold locks on their partial directories. Recoveries of one directory (by several
/// ranks) take turns. A repeated or interrupted recovery does no harm. Errors of a single partial
/// directory are reported in `kept_incomplete`.
/// \error kNotFound (directory), kDeadlineExceeded (another recovery does not end), and errors of
/// the directory's fsync: then durability is unproven.
absl::StatusOr<RecoveryReport> Recover(const std::string& directory,
                                       const RecoveryOptions& options);

/// Lists complete checkpoints by the time of their saves, newest last; changes no file. Step and
/// name do not affect the order: after a rollback the newest checkpoint has a lower step than older
/// ones. The manifests of all ranks are read: a checkpoint whose files have gone or shrunk since
/// the commit is incomplete. Unreadable and incomplete checkpoints are skipped; `passed_over`, if
/// not null, gets "NAME: why". \error The read error, when no checkpoint is complete and at least
/// one is unreadable.
absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(
    const std::string& directory, std::vector<std::string>* passed_over = nullptr);

/// As ListCheckpoints, of what was committed: with a commit record, only that record is read, for
/// any number of ranks.
absl::StatusOr<std::vector<CheckpointInfo>> ListRecorded(
    const std::string& directory, std::vector<std::string>* passed_over = nullptr);

/// Returns the newest checkpoint of ListCheckpoints. Of older checkpoints only the commit record is
/// read.
/// \error kNotFound when there is none.
absl::StatusOr<CheckpointInfo> FindNewest(const std::string& directory,
                                          std::vector<std::string>* passed_over = nullptr);

/// Describes the complete checkpoint at `path`.
/// \error kNotFound, kDataLoss (manifest does not parse) or kFailedPrecondition (incomplete), with
/// the reason.
absl::StatusOr<CheckpointInfo> InspectCheckpoint(const std::string& path);

/// The processes that write into a framework's directory (SaveRequest::files_only).
enum class SavesAtWork {
  kNone,     ///< No process of this machine, the only one that reaches the file system.
  kTrainer,  ///< A living trainer's save.
  kOrphan,   ///< Only workers, which finish the saves of dead trainers.
  kUnknown,  ///< The file system's locks give no answer.
};

/// Returns the processes at work on the saves into the framework's directory `path`.
/// \error errors of open and statfs.
absl::StatusOr<SavesAtWork> FindSavesAtWork(const std::string& path);

/// Returns, for each checkpoint of `complete`, whether its branch was abandoned by a rollback. The
/// line of a series is its newest checkpoint and the recorded ancestors of that one. A checkpoint
/// of the series is abandoned if its step is higher than that of a later checkpoint of the line.
/// One outside of the line is also abandoned if its parent is on the line or abandoned. A missing
/// link proves nothing; without recorded attempts no checkpoint is abandoned.
std::vector<bool> FindAbandoned(const std::vector<CheckpointInfo>& complete);

/// Returns the names of the manifests beside a file (SaveRequest::single_file): of the last save,
/// and of interrupted saves.
absl::StatusOr<std::vector<std::string>> FileManifests(const std::string& directory,
                                                       const std::string& name);

/// Removes a file durably, then the manifest. OK when nothing has the name.
/// \error kFailedPrecondition for a directory; errors of the removal.
absl::Status RemoveFile(const std::string& directory, const std::string& name);

/// Returns the names to remove under `retention` once `saved` is durable, oldest first: members of
/// the series of `saved`, never `saved` itself. Abandoned checkpoints are removed before all
/// others. `is_whole`, if not null, is asked about the newest: a checkpoint that is not whole
/// stays, and the next older checkpoint is kept, too.
std::vector<std::string> SelectForRemoval(
    const std::vector<CheckpointInfo>& complete, const Retention& retention,
    const std::string& saved, const std::function<bool(const CheckpointInfo&)>& is_whole = nullptr);

/// Removes the checkpoint of `attempt` at `path` as retention does: its name durably first, then
/// the files. Recover removes the rest after a crash. Deletes in this process.
/// \error kNotFound; kAborted when another save has the name; kFailedPrecondition, naming the
/// entry, for a foreign entry; errors of the renames, fsyncs and removals.
absl::Status RemoveCheckpoint(const std::string& path, const AttemptId& attempt);

}  // namespace holdfast

#endif  // HOLDFAST_RECOVERY_H_
