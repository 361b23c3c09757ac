// The trainer's part in a save of several ranks: its signs of life on the rank board, and the
// failure that its worker cannot publish any more.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_RANK_PRESENCE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_RANK_PRESENCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/ranks.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "runtime/worker/rank_board.h"

namespace holdfast::checkpointer {

/// From Join to Conclude one thread of this process gives a sign of life for it, every third of
/// `time_liveness_max`: a worker that is not there yet, is queued, or is inside of a long fsync
/// cannot.
///
/// \threadsafety All methods may be called from any thread.
class RankPresence {
 public:
  /// Makes the partial directory below `parent` if it is not there. The directories of `who` are
  /// not used. \error kAborted when another rank has failed already; errors of mkdir, open, write.
  static absl::StatusOr<std::shared_ptr<RankPresence>> Join(int parent, const RankInSave& who);
  ~RankPresence();
  RankPresence(const RankPresence&) = delete;
  RankPresence& operator=(const RankPresence&) = delete;

  /// Ends the signs of life of a rank whose save goes on, or is over, without them.
  void Leave();

  /// Publishes that this rank has failed and will not vote (rank 0: not rename). Only where no
  /// worker serves it. The last rank to fail removes the directory.
  void Fail(int parent, const absl::Status& why);

  /// The save was given up, but its worker cannot be stopped and may still vote.
  void GiveUp(const absl::Status& why);

  /// The worker has ended and `outcome` is what its trainer knows. Publishes what the worker could
  /// not. `reported`: the worker itself has said how it ended. If not, returns OK where the
  /// checkpoint was committed all the same.
  absl::Status Conclude(int parent, const absl::Status& outcome, bool reported);

  /// The time between two signs of life.
  absl::Duration interval() const;
  void Beat();

 private:
  RankPresence(const RankInSave& who, base::UniqueFd directory);
  void Publish(const absl::Status& why, bool is_final) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveIfLast(int parent);
  absl::Status ConcludeFailed(int parent, const absl::Status& outcome, bool reported)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasVoted() const;
  void AwaitDecision() const;

  const RankInSave who_;
  const std::string partial_;
  base::ForkGuard guard_;
  base::UniqueFd directory_;
  worker::RankBoard board_;
  base::Mutex mutex_;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

/// Publishes that SaveAsync refuses its part, if the save has other ranks. Returns `why`.
absl::Status RefuseSave(int parent, const std::shared_ptr<RankPresence>& presence,
                        const RankInSave& who, const absl::Status& why);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_RANK_PRESENCE_H_
