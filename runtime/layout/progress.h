// Words for the progress of a job, in the trainer and in a process that watches it.
#ifndef HOLDFAST_RUNTIME_LAYOUT_PROGRESS_H_
#define HOLDFAST_RUNTIME_LAYOUT_PROGRESS_H_

#include <cstdint>

#include "runtime/layout/job.h"

namespace holdfast::layout {

/// Returns the phase of a save of `bytes_total`. The worker writes while extents are sealed, so
/// that a save is "staging" until its last byte is sealed.
inline const char* PhaseWord(const Job& job, uint64_t bytes_sealed, uint64_t bytes_total) {
  if (bytes_sealed < bytes_total) return "staging";
  return WordIn({"queued", "writing", "syncing", "reading back", "manifest", "waiting for ranks",
                 "committing", "removing", "done"},
                static_cast<Phase>(job.phase.load(std::memory_order_relaxed)));
}

}  // namespace holdfast::layout

#endif  // HOLDFAST_RUNTIME_LAYOUT_PROGRESS_H_
