// What a job cost: CPU time and private memory.
#ifndef HOLDFAST_RUNTIME_WORKER_ACCOUNTING_H_
#define HOLDFAST_RUNTIME_WORKER_ACCOUNTING_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// CPU time of the worker in ns: of the process, or of the thread where it is one of the host's
/// (its pwrite threads, if there are any, are then not counted).
uint64_t CpuNs(Launcher launcher);

/// Raises `run->figures.worker_private_bytes_peak` to what this process has for itself now. Nothing
/// for a thread, whose memory is the host's.
void SamplePrivateBytes(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_ACCOUNTING_H_
