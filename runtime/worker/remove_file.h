// Removing one file of a checkpoint in steps: freeing a terabyte takes minutes, in which the
// trainer must see progress, a cancel must count, and the journal of the file system must not fill
// up.
#ifndef HOLDFAST_RUNTIME_WORKER_REMOVE_FILE_H_
#define HOLDFAST_RUNTIME_WORKER_REMOVE_FILE_H_

#include "runtime/layout/job.h"

namespace holdfast::worker {

enum class OnCancel { kStop, kGoOn };

/// Shortens the file step by step, then unlinks it; each is a step of `job`. A file with another
/// name elsewhere keeps its bytes. Returns 0, ENOENT and EISDIR for what is no file, ECANCELED when
/// the job is cancelled and `on_cancel` stops it, or the errno of the unlink.
int RemoveFile(int directory, const char* name, layout::Job* job, OnCancel on_cancel);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_REMOVE_FILE_H_
