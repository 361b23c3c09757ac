// A worker's part in a save of several ranks: its slot on the rank board, and its looks at the
// board.
//
// A rank joins when it opens the partial directory, votes by its durable manifest, and leaves with
// a failure. From joining to the end the worker reads the board about once a second, in every
// phase. A failure of any rank therefore ends all ranks. In a job of one rank every function does
// nothing.
#ifndef HOLDFAST_RUNTIME_WORKER_RANKS_H_
#define HOLDFAST_RUNTIME_WORKER_RANKS_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Bytes of JobRun::ranks.notes.
uint64_t RankNoteBytes(const layout::Job& job);

/// Opens the board in the partial directory and publishes this rank's presence. Returns false, with
/// the failure recorded, also when another rank has failed before.
bool JoinRanks(JobRun* run);

/// For a rank that has not voted, when a look is due: whether the save is in vain. Records why.
bool RanksHaveFailed(JobRun* run);

enum class Sight {
  kNothing,
  kFailure,    ///< JobRun::ranks.seen holds the rank and the reason.
  kCommitted,  ///< Rank 0 has renamed the directory.
};
/// Reads the board once and writes this rank's heartbeat.
Sight LookAtRanks(JobRun* run);

/// Marks this rank's part as done. Ranks that have not come count as missing from here on.
void BeginWaiting(JobRun* run);

/// Records the failure seen by LookAtRanks as this job's failure. Returns false.
bool FailAsSeen(JobRun* run);

/// Publishes this rank's failure once, also for a rank that failed before it joined.
void LeaveRanks(JobRun* run);

/// Publishes that an orphan's heartbeat pauses during an fsync, which may take minutes.
void BeginSilence(JobRun* run);
void EndSilence(JobRun* run);

/// Returns the deadline of the table, or the default.
uint64_t LivenessNs(const layout::Job& job);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_RANKS_H_
