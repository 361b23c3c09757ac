// Reads the files back from disk before any file gets its final name.
//
// The digest after a write compares memory. Memory can change while the disk reads it and change
// back. Only the bytes of the file, read past the page cache, prove the file.
#ifndef HOLDFAST_RUNTIME_WORKER_READ_BACK_H_
#define HOLDFAST_RUNTIME_WORKER_READ_BACK_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Reads every chunk of every NAME.tmp and compares the chunk with the seal. The files must be
/// durable.
bool ReadBackFiles(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_READ_BACK_H_
