// Removes one file of a checkpoint in steps. Freeing a terabyte takes minutes. During them the
// trainer must see progress, a cancel must take effect, and the file system's journal must not fill
// up.
#ifndef HOLDFAST_RUNTIME_WORKER_REMOVE_FILE_H_
#define HOLDFAST_RUNTIME_WORKER_REMOVE_FILE_H_

#include "runtime/layout/job.h"

namespace holdfast::worker {

enum class OnCancel { kStop, kGoOn };

/// Shortens the file step by step, then unlinks it; each is a step of `job`. A file with a second
/// hard link keeps its bytes. Returns 0, ENOENT, EISDIR for a directory, ECANCELED when the job is
/// cancelled and `on_cancel` stops the removal, or the errno of the unlink.
int RemoveFile(int directory, const char* name, layout::Job* job, OnCancel on_cancel);

/// Makes removals in the directory durable. A file system that cannot sync directories (EINVAL,
/// fsync(2)) makes nothing durable, and counts as synced. Returns 0 or an errno.
int SyncRemovals(int directory);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_REMOVE_FILE_H_
