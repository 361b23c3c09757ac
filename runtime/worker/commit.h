// The commit of a save: rank 0 renames the whole directory once, after every rank has voted.
//
// A rank votes by making its manifest durable.
// - Before its vote, a failing rank removes its files and publishes the failure on the rank board.
//   The other ranks give up when they see the failure. Rank 0 may give up until its rename.
// - After its vote, another rank can only ask rank 0 to stop. Removing its files before rank 0's
//   answer could take them out of a checkpoint that has just appeared.
// - Without an answer from rank 0 the files stay. A recovery distinguishes a complete directory
//   from an incomplete one.
#ifndef HOLDFAST_RUNTIME_WORKER_COMMIT_H_
#define HOLDFAST_RUNTIME_WORKER_COMMIT_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// The step after the manifest is durable. Returns true when the checkpoint stands under its final
/// name and the name survives power loss. For kFilesOnly: when every file does.
bool Commit(JobRun* run);

/// Returns true when the target is this attempt: renamed by rank 0, or promoted by a recovery after
/// this worker seemed dead.
bool TargetIsOurs(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_COMMIT_H_
