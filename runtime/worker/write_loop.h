// Writing what is sealed, as it is sealed: one thread, several transfers in flight.
#ifndef HOLDFAST_RUNTIME_WORKER_WRITE_LOOP_H_
#define HOLDFAST_RUNTIME_WORKER_WRITE_LOOP_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

inline constexpr uint32_t kDoorbellWatch = 0;
inline constexpr uint32_t kTrainerWatch = 1;

/// Sets up the loop's part of `run`, for the first time or to write everything once more. Its notes
/// and bits are mapped; nothing is in flight.
void PrepareWriteState(JobRun* run);

/// Writes and proves every extent. On failure nothing is in flight when it returns, unless
/// `run->io_stuck`.
bool WriteExtents(JobRun* run);

/// Waits for what is in flight in `queue` without looking at results. In a process it gives up
/// after a quarter of the stall deadline (`io_stuck`): the trainer, which kills at one and a half,
/// must hear why. A thread waits on, for ever if need be, because nothing but the last completion
/// makes its buffers free.
void Drain(JobRun* run, io::Queue* queue);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_WRITE_LOOP_H_
