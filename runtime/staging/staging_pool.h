// Leases and epochs: the holder, state and lifetime of each run of arena bytes.
//
//   state    entered by               owner of the next edge
//   free     Create, Release, Retire  the pool (Acquire)
//   filling  Acquire                  the stager: copies write the bytes
//   sealed   Seal                     the stager: the bytes are final and digested
//   writing  StartWriting             the supervisor: the worker may read the bytes
//   retired  Release, Retire          the pool: back to free at once
//
// Another edge would put bytes of another step into a checkpoint. It aborts in every build type.
#ifndef HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_
#define HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/staging.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "runtime/staging/arena.h"
#include "runtime/staging/extent_allocator.h"
#include "runtime/staging/lease.h"
#include "runtime/staging/lease_table.h"
#include "runtime/staging/residence.h"

namespace holdfast::staging {

/// \threadsafety All methods may be called from any thread.
/// \forksafety Checked by the caller (Checkpointer).
class StagingPool {
 public:
  /// `options`: as checked by ValidateOptions. \error As Arena::Create.
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(const StagingOptions& options);

  /// Drops the remaining registrations. Memory that may still be in use (held bytes, or a
  /// registration that could not be dropped) stays mapped for the life of the process.
  ~StagingPool();

  Arena& arena() { return *arena_; }

  /// Opens the next epoch. Epochs take leases strictly in the order of opening: an epoch gets none
  /// before all earlier epochs have called FinishLeasing. So saves cannot deadlock on the cap: all
  /// epochs before the oldest leasing epoch hold every lease they need, and end.
  uint64_t OpenEpoch();

  /// Reallocates the pages after a Trim and restores every registration, before a kept worker gets
  /// a job. An open epoch keeps further Trims out.
  /// \error kResourceExhausted when pages are short; errors of a registrant.
  absl::Status Prepare();

  /// Returns true when a save of `bytes` would wait for another save if begun now (WhenFull::kSkip
  /// and kFail). `bytes` is the sum of its leases, each rounded up to kIoAlignment. False without
  /// another save: a save larger than the free bytes waits only for itself. Quarantined bytes
  /// belong to no save in flight; a save waits for their release only where no chunk is free.
  bool WouldWait(uint64_t bytes) const;

  /// Returns true when `epoch` is at turn and all bytes that may ever be released are its own:
  /// without a lease now, only its own Release can help.
  bool HoldsAlone(uint64_t epoch) const;

  /// Leases `bytes` (at most kChunkBytes) to `epoch`, waiting for turn and memory. Callers of one
  /// epoch are served in the order of their calls. After a Trim the first call reallocates the
  /// pages.
  /// \error kDeadlineExceeded; kAborted after AbortEpoch, Quarantine or Retire; kResourceExhausted
  /// when pages are short; errors of a registrant.
  absl::StatusOr<Lease> Acquire(uint64_t epoch, uint32_t bytes, absl::Time deadline);

  /// Acquire without waiting.
  /// \error kUnavailable when no memory is free, or another epoch is at turn.
  absl::StatusOr<Lease> TryAcquire(uint64_t epoch, uint32_t bytes);

  /// Ends the leasing of `epoch`; the next epoch is at turn.
  void FinishLeasing(uint64_t epoch);

  /// Makes pending and later Acquires of `epoch` return kAborted, after its worker died or its save
  /// was cancelled. Leases stay held.
  void AbortEpoch(uint64_t epoch);

  void Seal(const Lease& lease);          ///< filling -> sealed
  void StartWriting(const Lease& lease);  ///< sealed -> writing

  /// writing -> free: the worker of a streaming save has acknowledged the lease after completion
  /// and re-digest. Returns false, without effect, for a lease in another state: a wrong message of
  /// another process must not end this process.
  bool Release(const Lease& lease);

  /// Frees all leases of `epoch`, in any state, and ends the epoch. The worker must be provably
  /// gone (or never started). Filling and sealed leases of a failed save become free only by
  /// Retire.
  void Retire(uint64_t epoch);

  /// Ends `epoch` but keeps its bytes, which a transfer may still touch, and reports `why`. Retire
  /// may follow.
  void Quarantine(uint64_t epoch, const std::string& why);

  /// Accounts control memory against its cap.
  /// \error kResourceExhausted naming the cap.
  absl::Status TakeControlBytes(uint64_t bytes);
  void ReturnControlBytes(uint64_t bytes);

  /// Adds `registrant` and registers (RestoreRegistration) with no trim in between: a trim would
  /// punch pages that were just pinned. Without pages the next Prepare or Acquire registers.
  /// \error The registrant's error; the registrant is then not added.
  absl::Status Register(Registrant* registrant);

  /// Adds an attached registrant that pins no page while no epoch is open.
  void AddRegistrant(Registrant* registrant);

  /// Removes a registrant whose registration is gone. Register, AddRegistrant and RemoveRegistrant
  /// wait for a trim under way: never call these methods from a registrant.
  void RemoveRegistrant(Registrant* registrant);

  /// Drops every registration, then punches. The next Acquire reallocates the pages.
  /// \error kFailedPrecondition while an epoch is open; a registrant's error, and the pages stay.
  absl::Status Trim();

  /// Returns the time since the last epoch ended (for idle trimming).
  absl::Duration IdleFor() const;

  StagingStats stats() const;

 private:
  struct Epoch {
    bool leasing_done = false;
    bool aborted = false;
    std::string quarantined;  // reason; empty: not quarantined
    uint64_t bytes_held = 0;
    uint64_t first_lease_ns = 0;   // 0: none yet
    std::deque<uint64_t> tickets;  // waiting calls of Acquire, in order
  };

  StagingPool(std::unique_ptr<Arena> arena, const StagingOptions& options);
  Epoch* Find(uint64_t epoch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t BytesQuarantined() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Epoch* EpochAtTurn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t AddTicket(Epoch* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveTicket(uint64_t epoch, uint64_t ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::optional<Lease>> TakeIfPossible(uint64_t epoch, uint64_t ticket,
                                                      uint32_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Move(const Lease& lease, LeaseState from, LeaseState to) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(const Lease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Work>
  absl::Status Unlocked(Work work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitSteady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WhyWaiting(uint64_t epoch, uint32_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::unique_ptr<Arena> arena_;
  const uint64_t control_bytes_max_;
  const std::function<void(void*, uint64_t)> on_released_;
  base::ForkGuard guard_;
  mutable base::Mutex mutex_;
  base::Condition changed_;
  // Not guarded by mutex_: used by the thread that has set changing_, and under the lock while
  // changing_ is not set.
  Residence residence_;
  bool changing_ ABSL_GUARDED_BY(mutex_) = false;
  ExtentAllocator allocator_ ABSL_GUARDED_BY(mutex_);
  LeaseTable leases_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Epoch> epochs_ ABSL_GUARDED_BY(mutex_);  // open epochs, oldest first
  uint64_t next_epoch_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t bytes_held_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t bytes_held_peak_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t control_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t control_bytes_peak_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waits_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration time_waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t trims_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t idle_since_ns_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_
