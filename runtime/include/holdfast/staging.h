// Staging memory of a Checkpointer: capacity, page kind, current holders.
#ifndef HOLDFAST_STAGING_H_
#define HOLDFAST_STAGING_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "holdfast/pod.h"

namespace holdfast {

/// Smallest arena: 4 chunks. Below, a streaming save would wait for the disk at every chunk.
inline constexpr uint64_t kArenaBytesMin = 4 * uint64_t{kChunkBytes};

/// Options of the staging arena, which is allocated once, at Create, and never grows.
struct StagingOptions {
  /// Size of the arena, rounded up to its page size, at least kArenaBytesMin. Larger saves stream
  /// through the arena.
  uint64_t arena_bytes = uint64_t{1} << 30;
  /// Upper bound of the control memory (job tables and manifests) of all saves in flight together.
  uint64_t control_bytes_max = uint64_t{256} << 20;
  /// Required page kind; kAuto takes the best available. Create fails when the required kind is
  /// missing.
  PageRung pages = PageRung::kAuto;
  /// Threads that pre-fault the arena at Create and digest staged bytes; 0 is one per CPU, at most
  /// 4.
  uint32_t threads = 0;
  /// Return the pages to the system after this time without a save in flight; InfiniteDuration:
  /// never.
  absl::Duration idle_trim = absl::InfiniteDuration();
  /// For tests of early reuse only. Called under the pool's lock with each run of memory, at the
  /// moment of its release.
  std::function<void(void* memory, uint64_t bytes)> on_released;
};

/// Returns the bytes that this process can allocate without waking the OOM killer: the least of
/// MemAvailable and the room in the control groups above the process. UINT64_MAX where the system
/// reports neither.
uint64_t MemoryAvailable();

/// Input of DefaultArenaBytes.
struct ArenaNeed {
  uint64_t state_bytes = 0;
  /// Processes on the node with an arena each, the caller's process included.
  uint32_t processes = 1;
  /// Bytes of the process's present arena, which the new arena replaces.
  uint64_t bytes_owned = 0;
};

/// Returns the arena size for a state: one save and the first chunks of the next, at most the
/// process's share of a quarter of the available memory, at least 16 MiB. Larger saves stream
/// through the arena.
uint64_t DefaultArenaBytes(const ArenaNeed& need);

/// Memory held by one epoch (one save).
struct EpochHolding {
  uint64_t epoch = 0;
  uint64_t bytes_held = 0;
  absl::Duration age;  ///< Since its first lease.
  /// Why the epoch's bytes are quarantined; empty: not quarantined. The save has ended, but a
  /// transfer may still touch the bytes. The bytes become free when the last transfer has provably
  /// ended.
  std::string quarantined;
};

/// A snapshot of the staging memory.
struct StagingStats {
  uint64_t arena_bytes = 0;
  uint64_t bytes_held = 0;         ///< Leased now, in any state, quarantine included.
  uint64_t bytes_held_peak = 0;    ///< Maximum since Create.
  uint64_t bytes_quarantined = 0;  ///< Part of `bytes_held` that belongs to ended saves.
  uint64_t control_bytes_held = 0;
  uint64_t control_bytes_peak = 0;
  /// Saves of every Checkpointer on the arena, also saves without memory.
  uint64_t saves_in_flight = 0;
  uint64_t leases = 0;          ///< Handed out since Create.
  uint64_t waits = 0;           ///< Leases that waited for memory.
  absl::Duration time_waiting;  ///< Sum of these waits.
  uint64_t trims = 0;
  bool resident = true;  ///< False after a trim, until the next save.
  PageRung pages = PageRung::kSmall;
  uint64_t page_bytes = 0;
  std::string pages_reason;  ///< Why better rungs were passed over.
  std::vector<EpochHolding> epochs;
};

/// A sealed extent before its publication to the worker, for fault injectors.
struct SealedExtent {
  void* memory = nullptr;  ///< In the staging arena.
  uint32_t bytes = 0;
  std::string file;
  uint64_t file_offset = 0;
  uint64_t epoch = 0;
};

}  // namespace holdfast

#endif  // HOLDFAST_STAGING_H_
