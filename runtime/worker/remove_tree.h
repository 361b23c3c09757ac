// Removing checkpoint directories in an order that no crash can turn into a wrong checkpoint, and
// in steps, so that deleting hundreds of gigabytes neither blocks a cancel nor fills the journal.
#ifndef HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_
#define HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_

#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::worker {

/// Removes the flat directory `name` below `parent`: manifests, durably; then files; then itself,
/// durably. One that is not there is removed already. kFailedPrecondition: a checkpoint that holds
/// an entry of others stays whole (`job->completion.foreign` names the entry), and so does a
/// subdirectory, with its parent. `buffer` has kDirectoryBufferBytes.
bool RemoveDirectory(int parent, const char* name, char* buffer, layout::Job* job,
                     Failure* failure);

/// Whether the directory has no entry.
bool IsEmpty(int directory, char* buffer);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_REMOVE_TREE_H_
