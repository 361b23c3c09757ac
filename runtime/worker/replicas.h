// Names the difference between the replicated files of two ranks.
#ifndef HOLDFAST_RUNTIME_WORKER_REPLICAS_H_
#define HOLDFAST_RUNTIME_WORKER_REPLICAS_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Rank 0: records that the replicated files of `rank`, which has voted, differ from this rank's.
/// The record names the first tensor that differs, or else the file. Returns false.
bool FailReplicas(JobRun* run, uint32_t rank);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_REPLICAS_H_
