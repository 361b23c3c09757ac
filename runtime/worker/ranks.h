// A worker's part in a save of several ranks: its slot on the rank board, and what it sees there.
//
// A rank joins when it opens the partial directory, votes by its durable manifest, and leaves with
// a failure. From joining to the end the worker looks at the board about once a second, in every
// phase, so that a failure of any rank ends all. Without other ranks every function does nothing.
#ifndef HOLDFAST_RUNTIME_WORKER_RANKS_H_
#define HOLDFAST_RUNTIME_WORKER_RANKS_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Bytes of JobRun::ranks.notes.
uint64_t RankNoteBytes(const layout::Job& job);

/// Opens the board in the partial directory and publishes that this rank is there. False, with the
/// failure recorded, also when another rank has failed before.
bool JoinRanks(JobRun* run);

/// For a rank that has not voted, when a look is due: whether the save is in vain. Records why.
bool RanksHaveFailed(JobRun* run);

enum class Sight {
  kNothing,
  kFailure,    ///< JobRun::ranks.seen says which rank, and why.
  kCommitted,  ///< Rank 0 has renamed the directory.
};
/// One look at the board; also this rank's own sign of life.
Sight LookAtRanks(JobRun* run);

/// From here on this rank's part is done, and ranks that have not come are missed.
void BeginWaiting(JobRun* run);

/// Records what LookAtRanks has seen as this job's failure. Returns false.
bool FailAsSeen(JobRun* run);

/// Publishes this rank's failure, once. Also for a rank that failed before it joined.
void LeaveRanks(JobRun* run);

/// An orphan gives no sign of life during an fsync, which may take minutes: it says so before.
void BeginSilence(JobRun* run);
void EndSilence(JobRun* run);

/// The deadline that the table gives, or the default.
uint64_t LivenessNs(const layout::Job& job);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_RANKS_H_
