// The commit of a single file, in a directory with foreign files.
#ifndef HOLDFAST_RUNTIME_WORKER_SINGLE_FILE_H_
#define HOLDFAST_RUNTIME_WORKER_SINGLE_FILE_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Renames the job's file when the manifest is durable. Then removes the companions of older saves
/// of the file. Fails with kAborted when a younger save has committed, or when the temporary file
/// has gone.
bool CommitSingleFile(JobRun* run);

/// Checks that the temporary name leads to the trainer's locked file. Fails with kAborted
/// otherwise.
bool CheckTemporary(JobRun* run);

/// Returns true when a recovery that does not trust the file system's locks has given the file its
/// name.
bool IsPromoted(const JobRun& run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_SINGLE_FILE_H_
