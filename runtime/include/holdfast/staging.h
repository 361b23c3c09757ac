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

/// Memory that this process could take now without being killed for it, in bytes: the least of what
/// the machine has available (MemAvailable) and what the control groups above the process leave.
/// UINT64_MAX where the system says neither.
uint64_t MemoryAvailable();

/// For whom an arena is: see DefaultArenaBytes.
struct ArenaNeed {
  uint64_t state_bytes = 0;
  /// Processes on this node, this one counted, that each take an arena.
  uint32_t processes = 1;
  /// Of the process's present arena, which the new one replaces.
  uint64_t bytes_owned = 0;
};

/// The size of arena that fits a state: one save and the first chunks of the next, but no more than
/// the process's share of a quarter of the memory that is available. Larger saves stream through
/// it. At least 16 MiB.
uint64_t DefaultArenaBytes(const ArenaNeed& need);

/// What one epoch (one save) holds.
struct EpochHolding {
  uint64_t epoch = 0;
  uint64_t bytes_held = 0;
  absl::Duration age;  ///< Since its first lease.
  /// Why its bytes are quarantined; empty when they are not. Its save has ended, but a transfer may
  /// still touch them. They come back when the last one has provably landed.
  std::string quarantined;
};

/// A snapshot of the staging memory; readable at any time.
struct StagingStats {
  uint64_t arena_bytes = 0;
  uint64_t bytes_held = 0;         ///< In leases of any state, now; quarantined ones included.
  uint64_t bytes_held_peak = 0;    ///< The most there ever was.
  uint64_t bytes_quarantined = 0;  ///< Of `bytes_held`: not of a save in flight.
  uint64_t control_bytes_held = 0;
  uint64_t control_bytes_peak = 0;
  /// Of all front doors to the arena; also those that hold no memory any more.
  uint64_t saves_in_flight = 0;
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
