// Removing checkpoint directories in an order that no crash can turn into a wrong checkpoint, and
// in steps, so that deleting hundreds of gigabytes neither blocks a cancel nor fills the journal.
#ifndef HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_
#define HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_

#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::worker {

/// Removes the flat directory `name` below `parent` durably, in an order that leaves no wrong
/// checkpoint and takes no file of others, wherever a crash ends it. One that is not there is
/// removed already. What was committed goes under its retired name, which it gets here where it
/// lacks it. kFailedPrecondition: `job->completion.foreign` is an entry of others. A subdirectory,
/// and any such entry of a whole checkpoint, keeps all of it; of others the rest goes. Stops when
/// `job` is cancelled. `buffer` has kDirectoryBufferBytes.
bool RemoveDirectory(int parent, const char* name, char* buffer, layout::Job* job,
                     Failure* failure);

/// Whether the directory has no entry.
bool IsEmpty(int directory, char* buffer);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_
