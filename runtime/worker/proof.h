// Comparing bytes with the digest that was taken when they were sealed.
#ifndef HOLDFAST_RUNTIME_WORKER_PROOF_H_
#define HOLDFAST_RUNTIME_WORKER_PROOF_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Digests extent `index`, whose bytes stand at `bytes` (in the arena, or read back from disk). A
/// difference is kDataLoss with tensor, file and range: the first piece whose own digest differs,
/// else the first that has none.
bool ProveExtent(JobRun* run, uint32_t index, const char* bytes);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_PROOF_H_
