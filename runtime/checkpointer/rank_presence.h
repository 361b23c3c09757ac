// The trainer's part in a save of several ranks: signs of life on the rank board, and failures that
// its worker cannot publish.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_RANK_PRESENCE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_RANK_PRESENCE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "holdfast/ranks.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "runtime/worker/rank_board.h"

namespace holdfast::checkpointer {

/// True for the error of a Join that found the failure of another rank, or has published its own:
/// no rank waits. A second Join could make the directory anew that the last rank to fail has
/// removed.
bool AllRanksKnow(const absl::Status& status);

/// From Join to Conclude one thread of the process writes a sign of life for the rank, every third
/// of `time_liveness_max`. A worker cannot write signs of life before its start, in a queue, or
/// inside a long fsync.
///
/// \threadsafety All methods may be called from any thread.
class RankPresence {
 public:
  /// Joins the save of `who`, whose directories are not used. Makes the partial directory below
  /// `parent` if missing. When this rank is the last to fail, and files of other ranks remain in
  /// the directory, Join, Fail or Conclude calls `on_remains`. \error kAborted or
  /// kFailedPrecondition when another rank has failed already; errors of mkdir, open, write, of a
  /// new thread.
  static absl::StatusOr<std::shared_ptr<RankPresence>> Join(int parent, const RankInSave& who,
                                                            std::function<void()> on_remains = {});
  ~RankPresence();
  RankPresence(const RankPresence&) = delete;
  RankPresence& operator=(const RankPresence&) = delete;

  /// Ends the signs of life of this rank. The save continues or has ended.
  void Leave();

  /// Publishes the failure of the rank, which will not vote (rank 0: not rename). Only for a rank
  /// without a worker. The last rank to fail removes the directory.
  void Fail(int parent, const absl::Status& why);

  /// Publishes that the save was given up. The worker cannot be stopped and may still vote.
  void GiveUp(const absl::Status& why);

  /// Publishes results that the ended worker could not publish. `outcome`: the trainer's result.
  /// `reported`: the worker itself has reported its end. Without a report, returns OK if the
  /// checkpoint was committed.
  absl::Status Conclude(int parent, const absl::Status& outcome, bool reported);

  /// As RankAnnouncement::CheckRanks.
  absl::Status CheckRanks(absl::Span<const uint32_t> ranks);

  /// The time between two signs of life.
  absl::Duration interval() const;
  void Beat();

 private:
  RankPresence(const RankInSave& who, base::UniqueFd directory, std::function<void()> on_remains);
  void Publish(const absl::Status& why, bool is_final) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveIfLast(int parent);
  absl::Status ConcludeFailed(int parent, const absl::Status& outcome, bool reported)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasVoted() const;
  void AwaitDecision() const;

  /// The signs of life of another rank, and the time since when they have not changed.
  struct Note {
    uint64_t beats = 0;
    absl::Time since;
  };

  const RankInSave who_;
  const std::string partial_;
  base::ForkGuard guard_;
  base::UniqueFd directory_;
  const std::function<void()> on_remains_;
  worker::RankBoard board_;
  base::Mutex mutex_;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint32_t, Note> notes_ ABSL_GUARDED_BY(mutex_);
};

/// Publishes the refusal of a save to its other ranks, if any. Returns `why`.
absl::Status RefuseSave(int parent, const std::shared_ptr<RankPresence>& presence,
                        const RankInSave& who, const absl::Status& why);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_RANK_PRESENCE_H_
