// The two kinds of job, each as a straight line of steps.
#ifndef HOLDFAST_RUNTIME_WORKER_JOBS_H_
#define HOLDFAST_RUNTIME_WORKER_JOBS_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Writes, proves and commits, or removes every trace. The outcome is in `run->failure`; nothing is
/// in flight any more, unless `run->io_stuck`.
void RunSave(JobRun* run);

/// Removes the directories of the table.
void RunDelete(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_JOBS_H_
