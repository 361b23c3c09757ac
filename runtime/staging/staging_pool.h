// Who holds which bytes of the arena, in which state, and until when: leases and epochs.
//
//   state    entered by               owner of the next edge
//   free     Create, Release, Retire  the pool (Acquire)
//   filling  Acquire                  the stager: copies run into it
//   sealed   Seal                     the stager: nothing writes it any more, its digest is taken
//   writing  StartWriting             the supervisor: the worker may read it
//   retired  Release, Retire          the pool: back to free at once
//
// Any other edge aborts, in every build type: it would be a checkpoint with another step's bytes in
// it.
#ifndef HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_
#define HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/staging.h"
#include "runtime/staging/arena.h"
#include "runtime/staging/lease.h"
#include "runtime/staging/residence.h"

namespace holdfast::staging {

/// \threadsafety All methods may be called from any thread.
/// \forksafety The caller guards (Checkpointer does).
class StagingPool {
 public:
  /// \error kInvalidArgument when the arena is smaller than 4 chunks, and those of Arena::Create.
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(const StagingOptions& options);

  /// Drops the registrations that are left. Memory that somebody may still use (bytes that are
  /// held, or a registration that could not be dropped) stays mapped for the life of the process.
  ~StagingPool();

  Arena& arena();

  /// Opens the next epoch. Epochs take their leases strictly in the order of their opening: an
  /// epoch gets none before the ones before it have all they need (FinishLeasing). So the oldest
  /// one always goes on, and saves cannot deadlock on the cap: all that are before it hold all they
  /// need, and end.
  uint64_t OpenEpoch();

  /// Takes the pages again after a Trim, and restores every registration: before a kept worker is
  /// handed a job. With an epoch open no Trim can come in between.
  /// \error kResourceExhausted when the machine has the pages no more, or what a registrant says.
  absl::Status Prepare();

  /// Whether a save of `bytes` (the sum of its leases, each rounded up to kIoAlignment) would have
  /// to wait for any other if it began now (for WhenFull::kSkip and kFail). Never when there is no
  /// other: a save larger than what is free waits for itself only. Quarantined bytes belong to no
  /// save in flight; a save waits for them only where they leave no room for a chunk.
  bool WouldWait(uint64_t bytes) const;

  /// Whether it is this epoch's turn and all bytes that may ever come back are its own: if it gets
  /// no lease now, only its own Release can help.
  bool HoldsAlone(uint64_t epoch) const;

  /// Takes a lease of `bytes` (at most kChunkBytes) for `epoch`, waiting for its turn and for
  /// memory; several callers of one epoch are served in the order in which they came. After a Trim
  /// the first one takes the pages again.
  /// \error kDeadlineExceeded; kAborted after AbortEpoch, Quarantine or Retire; kResourceExhausted
  /// when the pages cannot be taken again, or what a registrant says.
  absl::StatusOr<Lease> Acquire(uint64_t epoch, uint32_t bytes, absl::Time deadline);

  /// Acquire without waiting: kUnavailable when there is nothing to take yet.
  absl::StatusOr<Lease> TryAcquire(uint64_t epoch, uint32_t bytes);

  /// This epoch will ask for no more: the next one is at turn.
  void FinishLeasing(uint64_t epoch);

  /// Its pending and later Acquires return kAborted: its worker died, or it was cancelled. Leases
  /// stay held.
  void AbortEpoch(uint64_t epoch);

  void Seal(const Lease& lease);          ///< filling -> sealed
  void StartWriting(const Lease& lease);  ///< sealed -> writing

  /// writing -> free: the worker of a streaming save has acknowledged it after its completion and
  /// re-digest. False, and nothing changes, if it is in another state: what another process says
  /// must not end this one.
  bool Release(const Lease& lease);

  /// The epoch's worker is provably gone (or never was): whatever it still holds is free, in any
  /// state, and the epoch is over. The only way that filling and sealed leases of a failed save
  /// come back.
  void Retire(uint64_t epoch);

  /// The save has ended, but a transfer may still touch its bytes: keeps them and reports `why`.
  /// Retire may still follow.
  void Quarantine(uint64_t epoch, const std::string& why);

  /// Accounts control memory against its cap. \error kResourceExhausted naming the cap.
  absl::Status TakeControlBytes(uint64_t bytes);
  void ReturnControlBytes(uint64_t bytes);

  /// Registers it (RestoreRegistration) with no trim in between, which would punch pages that it
  /// has just pinned; when the pages are not there, the next Prepare or Acquire does.
  /// \error The registrant's own; then it was not added.
  absl::Status Register(Registrant* registrant);

  /// Adds one that is attached already and pins nothing while no epoch is open.
  void AddRegistrant(Registrant* registrant);

  /// After its registration is gone and before it dies. These three wait for a trim under way, so
  /// never call them from within a registrant.
  void RemoveRegistrant(Registrant* registrant);

  /// Drops every registration, then punches. The next Acquire takes the pages again.
  /// \error kFailedPrecondition while any epoch is open; a registrant's, and then the pages stay.
  absl::Status Trim();

  /// For how long no epoch has been open (for trimming when idle).
  absl::Duration IdleFor() const;

  StagingStats stats() const;

 private:
  class Impl;
  explicit StagingPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_
