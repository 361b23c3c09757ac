// The exclusive right to fill a run of the arena.
#ifndef HOLDFAST_RUNTIME_STAGING_LEASE_H_
#define HOLDFAST_RUNTIME_STAGING_LEASE_H_

#include <cstdint>

namespace holdfast::staging {

/// A plain value; StagingPool holds the state.
struct Lease {
  uint32_t index = 0;   ///< In the lease table.
  uint32_t bytes = 0;   ///< Rounded up to kIoAlignment.
  uint64_t offset = 0;  ///< In the arena, a multiple of kIoAlignment.
  uint64_t epoch = 0;
  uint64_t serial = 0;  ///< Unique among all leases, so that a stale copy is refused.
  friend bool operator==(const Lease&, const Lease&) = default;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_LEASE_H_
