// The staging memory that a Checkpointer owns: what it may take, what it is made of, who holds what
// since when.
#ifndef HOLDFAST_STAGING_H_
#define HOLDFAST_STAGING_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "holdfast/pod.h"

namespace holdfast {

/// How the staging arena is made. It is taken once, at Create, and never grows.
struct StagingOptions {
  /// Size of the arena, rounded up to its page size; saves larger than this stream through it. At
  /// least 4 chunks (16 MiB).
  uint64_t arena_bytes = uint64_t{1} << 30;
  /// Upper bound of the control memory (job tables and manifests) of all saves in flight together.
  uint64_t control_bytes_max = uint64_t{256} << 20;
  /// Anything but kAuto: that kind of page or an error.
  PageRung pages = PageRung::kAuto;
  /// Threads that pre-fault the arena at Create and digest what was staged; 0 is one per CPU, at
  /// most 4.
  uint32_t threads = 0;
  /// Give the pages back to the system after this long without a save in flight; InfiniteDuration
  /// never does.
  absl::Duration idle_trim = absl::InfiniteDuration();
  /// For proving that nothing is reused too early, never for production: called with each run of
  /// memory the moment that it may be handed out again, under the pool's lock.
  std::function<void(void* memory, uint64_t bytes)> on_released;
};

/// What one epoch (one save) holds.
struct EpochHolding {
  uint64_t epoch = 0;
  uint64_t bytes_held = 0;
  absl::Duration age;  ///< Since its first lease.
  bool quarantined =
      false;  ///< A time-out passed while its worker could not be proven gone; never reused.
};

/// A snapshot of the staging memory; readable at any time.
struct StagingStats {
  uint64_t arena_bytes = 0;
  uint64_t bytes_held = 0;       ///< In leases of any state, now.
  uint64_t bytes_held_peak = 0;  ///< The most there ever was.
  uint64_t bytes_quarantined = 0;
  uint64_t control_bytes_held = 0;
  uint64_t control_bytes_peak = 0;
  uint64_t leases = 0;          ///< Handed out since Create.
  uint64_t waits = 0;           ///< Leases that had to wait for memory.
  absl::Duration time_waiting;  ///< Sum over those.
  uint64_t trims = 0;
  bool resident = true;  ///< False after a trim, until the next save.
  PageRung pages = PageRung::kSmall;
  uint64_t page_bytes = 0;
  std::string pages_reason;  ///< Why this rung and not a better one.
  std::vector<EpochHolding> epochs;
};

/// What a fault injector sees of an extent between its seal and its publication to the worker.
struct SealedExtent {
  void* memory = nullptr;  ///< In the staging arena.
  uint32_t bytes = 0;
  std::string file;
  uint64_t file_offset = 0;
  uint64_t epoch = 0;
};

}  // namespace holdfast

#endif  // HOLDFAST_STAGING_H_
