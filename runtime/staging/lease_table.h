// The state of every lease, and the edges between states.
#ifndef HOLDFAST_RUNTIME_STAGING_LEASE_TABLE_H_
#define HOLDFAST_RUNTIME_STAGING_LEASE_TABLE_H_

#include <cstdint>
#include <vector>

#include "runtime/staging/lease.h"

namespace holdfast::staging {

/// States of staging_pool.h; a retired lease is free at once.
enum class LeaseState : uint8_t { kFree, kFilling, kSealed, kWriting };

/// \threadsafety None: StagingPool locks.
class LeaseTable {
 public:
  /// free -> filling. Assigns `lease.index` and `lease.serial`.
  Lease Add(Lease lease);

  /// Moves a lease between states. Aborts unless `lease` equals its entry and is in state `from`.
  void Move(const Lease& lease, LeaseState from, LeaseState to);

  /// Returns true when `lease` equals its entry and is in state `state`.
  bool Is(const Lease& lease, LeaseState state) const;

  /// Removes and returns the leases of `epoch` in any state.
  std::vector<Lease> RemoveAll(uint64_t epoch);

  uint64_t added() const { return added_; }

 private:
  struct Entry {
    Lease lease;
    LeaseState state = LeaseState::kFree;
  };
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;  // indices into entries_
  uint64_t added_ = 0;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_LEASE_TABLE_H_
