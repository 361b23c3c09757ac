// Making a save appear: one rename of the whole directory, by rank 0, once every rank has voted.
//
// A rank votes by making its manifest durable. Before its vote a rank that fails removes its files
// and says so on the rank board, at which the others give up; rank 0 may do so until its rename.
// After its vote another rank can only ask rank 0 to stop: removing its files before rank 0 has
// answered could take them out of a checkpoint that just appeared. What it leaves when rank 0 does
// not answer is sorted out by a recovery, which tells a complete directory from an incomplete one.
#ifndef HOLDFAST_RUNTIME_WORKER_COMMIT_H_
#define HOLDFAST_RUNTIME_WORKER_COMMIT_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// The step after this rank's manifest is durable. True: the checkpoint stands under its final name
/// (for kFilesOnly: all files do), and that survives power loss.
bool Commit(JobRun* run);

/// Whether the target is this very attempt: renamed by rank 0, or promoted by a recovery that took
/// this worker for dead.
bool TargetIsOurs(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_COMMIT_H_
