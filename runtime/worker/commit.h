// Making a save appear: one rename of the whole directory, by rank 0, once every rank has voted.
//
// A rank votes by making its manifest durable. Before its vote a rank that fails removes its files
// and leaves the marker "aborted", at which the others give up; rank 0 may do so until its rename.
// After its vote another rank can only wait for what rank 0 does: removing its files then could
// take them out of a checkpoint that just appeared. What it leaves when it gives up waiting is
// sorted out by a recovery, which can tell a complete directory from an incomplete one.
#ifndef HOLDFAST_RUNTIME_WORKER_COMMIT_H_
#define HOLDFAST_RUNTIME_WORKER_COMMIT_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// The step after this rank's manifest is durable. True: the checkpoint stands under its final name
/// (for kFilesOnly: all files do), and that survives power loss.
bool Commit(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_COMMIT_H_
