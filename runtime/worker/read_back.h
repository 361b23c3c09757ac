// Reading back what is really on disk, before anything gets its final name.
//
// The second look after a write compares memory; memory can change while the disk reads it and
// change back. Only the bytes of the file, read past the page cache, prove the file.
#ifndef HOLDFAST_RUNTIME_WORKER_READ_BACK_H_
#define HOLDFAST_RUNTIME_WORKER_READ_BACK_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Reads every chunk of every NAME.tmp (all durable by now) and compares it with its seal.
bool ReadBackFiles(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_READ_BACK_H_
