// What a job cost: CPU time and private memory.
#ifndef HOLDFAST_RUNTIME_WORKER_ACCOUNTING_H_
#define HOLDFAST_RUNTIME_WORKER_ACCOUNTING_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Returns the worker's CPU time in ns: of the process, or of the thread where the worker is a
/// thread of the host. Threads of the pwrite engine are not counted for a thread.
uint64_t CpuNs(Launcher launcher);

/// Raises `run->figures.worker_private_bytes_peak` to this process's current private bytes. Does
/// nothing for a thread, whose memory is the host's.
void SamplePrivateBytes(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_ACCOUNTING_H_
