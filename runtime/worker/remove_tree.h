// Removes checkpoint directories in an order that no crash can turn into a wrong checkpoint.
// Removal goes in steps, so that deleting hundreds of gigabytes neither blocks a cancel nor fills
// the journal.
#ifndef HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_
#define HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_

#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::worker {

/// Removes the flat directory `name` below `parent` durably. A crash at any point leaves no wrong
/// checkpoint and removes no foreign file. An absent directory counts as removed. A committed
/// directory is removed under its retired name and is renamed first where needed.
/// A subdirectory keeps the whole directory, and so does any foreign entry of a whole checkpoint.
/// In other directories only the foreign entries stay. Fails with kFailedPrecondition then;
/// `job->completion.foreign` names the entry. Stops when `job` is cancelled. `buffer` has
/// kDirectoryBufferBytes.
bool RemoveDirectory(int parent, const char* name, char* buffer, layout::Job* job,
                     Failure* failure);

/// Whether the directory has no entry.
bool IsEmpty(int directory, char* buffer);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_
