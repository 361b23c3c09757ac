// Writes extents as they are sealed: one thread, several transfers in flight.
#ifndef HOLDFAST_RUNTIME_WORKER_WRITE_LOOP_H_
#define HOLDFAST_RUNTIME_WORKER_WRITE_LOOP_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

inline constexpr uint32_t kDoorbellWatch = 0;
inline constexpr uint32_t kTrainerWatch = 1;

/// Sets up the loop's part of `run`, for the first time or to write everything once more. Its notes
/// and bits are mapped; nothing is in flight.
void PrepareWriteState(JobRun* run);

/// Writes and proves every extent. After a failure nothing is in flight on return, unless
/// `run->io_stuck`.
bool WriteExtents(JobRun* run);

/// Waits for the transfers in flight in `queue` and ignores their results. A process gives up after
/// a quarter of the stall deadline (`io_stuck`): the trainer kills at one and a half deadlines and
/// must get the reason before. A thread waits without limit, because only the last completion frees
/// its buffers.
void Drain(JobRun* run, io::Queue* queue);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_WRITE_LOOP_H_
