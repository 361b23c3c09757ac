// Who holds which bytes of the arena, in which state, and until when: leases and epochs.
//
//   state     entered by                       owner of the next edge
//   free      Create, Release, Retire          the pool (Acquire)
//   filling   Acquire                          the stager: copies run into it
//   sealed    Seal                             the stager: nothing writes it any more, its digest
//   is taken writing   StartWriting                     the supervisor: the worker may read it
//   retired   Release, Retire                  the pool: back to free at once
//
// Any other edge aborts, in every build type: it would be a checkpoint with another step's bytes in
// it.
#ifndef HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_
#define HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/staging.h"
#include "runtime/staging/arena.h"

namespace holdfast::staging {

/// The exclusive right to fill a run of the arena. A plain value; StagingPool knows its state.
struct Lease {
  uint32_t index = 0;   ///< In the lease table.
  uint32_t bytes = 0;   ///< Rounded up to kIoAlignment.
  uint64_t offset = 0;  ///< In the arena, a multiple of kIoAlignment.
  uint64_t epoch = 0;
};

/// Somebody who has pinned or registered the arena's pages: a device, a kept worker.
class Registrant {
 public:
  virtual ~Registrant() = default;
  /// Drops the registration and returns only when that is done (acknowledged). On an error the
  /// pages stay.
  virtual absl::Status DropRegistration() = 0;
  /// Registers anew, after the pages were taken again.
  virtual absl::Status RestoreRegistration() = 0;
};

/// \threadsafety All methods may be called from any thread.
/// \forksafety The caller guards (Checkpointer does).
class StagingPool {
 public:
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(const StagingOptions& options);
  ~StagingPool();

  Arena& arena();

  /// Opens the next epoch. Epochs take their leases strictly in the order of their opening: an
  /// epoch gets none before the ones before it have all they need (FinishLeasing). So the oldest
  /// one always goes on, and saves cannot deadlock on the cap: all that are before it hold all they
  /// need, and end.
  uint64_t OpenEpoch();

  /// Whether a save of `bytes` could be staged now without waiting for any other (for
  /// WhenFull::kSkip and kFail).
  bool WouldWait(uint64_t bytes) const;

  /// Takes a lease of `bytes` (at most kChunkBytes) for `epoch`, waiting for its turn and for
  /// memory. \error kDeadlineExceeded; kAborted after AbortEpoch; kResourceExhausted when the pages
  /// cannot be taken again.
  absl::StatusOr<Lease> Acquire(uint64_t epoch, uint32_t bytes, absl::Time deadline);

  /// Acquire without waiting: kUnavailable when there is nothing to take yet.
  absl::StatusOr<Lease> TryAcquire(uint64_t epoch, uint32_t bytes);

  /// This epoch will ask for no more.
  void FinishLeasing(uint64_t epoch);

  /// Its pending and later Acquires return kAborted: its worker died, or it was cancelled. Leases
  /// stay held.
  void AbortEpoch(uint64_t epoch);

  void Seal(const Lease& lease);          ///< filling -> sealed
  void StartWriting(const Lease& lease);  ///< sealed -> writing

  /// writing -> free: the worker of a streaming save has acknowledged it after its completion and
  /// re-digest.
  void Release(const Lease& lease);

  /// The epoch's worker is provably gone (or never was): whatever it still holds is free, in any
  /// state, and the epoch is over. The only way that filling and sealed leases of a failed save
  /// come back.
  void Retire(uint64_t epoch);

  /// A time-out passed and the worker is not provably gone: keep the bytes, report them. Retire may
  /// still follow.
  void Quarantine(uint64_t epoch);

  /// Accounts control memory against its cap. \error kResourceExhausted naming the cap.
  absl::Status TakeControlBytes(uint64_t bytes);
  void ReturnControlBytes(uint64_t bytes);

  void AddRegistrant(Registrant* registrant);
  void RemoveRegistrant(Registrant* registrant);

  /// Drops every registration, then punches. \error kFailedPrecondition while any byte is held.
  absl::Status Trim();

  /// Whether nothing was held for at least this long (for trimming when idle).
  absl::Duration IdleFor() const;

  StagingStats stats() const;

 private:
  class Impl;
  explicit StagingPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_STAGING_POOL_H_
