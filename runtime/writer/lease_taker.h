// Leases the memory of an extent, and waits for free memory.
#ifndef HOLDFAST_RUNTIME_WRITER_LEASE_TAKER_H_
#define HOLDFAST_RUNTIME_WRITER_LEASE_TAKER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/save_state.h"

namespace holdfast::writer {

/// \threadsafety All methods may be called from any thread; each extent is leased once.
class LeaseTaker {
 public:
  LeaseTaker(staging::StagingPool* pool, absl::Duration time_memory_max)
      : pool_(pool), time_memory_max_(time_memory_max) {}

  /// Leases extent `index`; returns false if there is no room now.
  absl::StatusOr<bool> TryTake(SaveState* save, uint32_t index);

  /// Waits up to `timeout` for room, and leases. Switches the save to streaming if only the save's
  /// own bytes could make room. Returns false if there is no room yet.
  absl::StatusOr<bool> WaitAndTake(SaveState* save, uint32_t index, absl::Duration timeout);

  /// Waits as long as the options allow.
  absl::Status Take(SaveState* save, uint32_t index);

  /// Returns OK until the wait since `since` has reached the limit of the options.
  absl::Status CheckWaitDeadline(const SaveState& save, absl::Time since) const;

 private:
  void Note(SaveState* save, uint32_t index, const staging::Lease& lease);

  staging::StagingPool* pool_;
  absl::Duration time_memory_max_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_LEASE_TAKER_H_
