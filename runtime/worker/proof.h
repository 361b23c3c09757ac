// Comparison of bytes with the digest of their seal.
#ifndef HOLDFAST_RUNTIME_WORKER_PROOF_H_
#define HOLDFAST_RUNTIME_WORKER_PROOF_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Digests extent `index`, whose bytes are at `bytes` (in the arena, or read back from disk). A
/// difference is kDataLoss with tensor, file and range of the first piece whose own digest differs,
/// else of the first piece without a digest.
bool ProveExtent(JobRun* run, uint32_t index, const char* bytes);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_PROOF_H_
