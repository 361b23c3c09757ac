#include "runtime/staging/lease_table.h"

#include "runtime/base/check.h"

namespace holdfast::staging {

Lease LeaseTable::Add(Lease lease) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(entries_.size()));
    entries_.emplace_back();
  }
  lease.index = free_.back();
  free_.pop_back();
  lease.serial = ++added_;
  entries_[lease.index] = {.lease = lease, .state = LeaseState::kFilling};
  return lease;
}

void LeaseTable::Move(const Lease& lease, LeaseState from, LeaseState to) {
  HOLDFAST_CHECK(lease.index < entries_.size(), "a lease that this pool never gave");
  Entry& entry = entries_[lease.index];
  HOLDFAST_CHECK(entry.state != LeaseState::kFree && entry.lease == lease,
                 "a lease that was given back: its bytes may be another save's by now");
  HOLDFAST_CHECK(entry.state == from,
                 "an illegal edge between lease states: bytes would be read while they are "
                 "written, or reused while they are read");
  entry.state = to;
  if (to == LeaseState::kFree) free_.push_back(lease.index);
}

bool LeaseTable::Is(const Lease& lease, LeaseState state) const {
  if (lease.index >= entries_.size()) return false;
  const Entry& entry = entries_[lease.index];
  return entry.state == state && entry.lease == lease;
}

std::vector<Lease> LeaseTable::RemoveAll(uint64_t epoch) {
  std::vector<Lease> removed;
  for (Entry& entry : entries_) {
    if (entry.state == LeaseState::kFree || entry.lease.epoch != epoch) continue;
    entry.state = LeaseState::kFree;
    free_.push_back(entry.lease.index);
    removed.push_back(entry.lease);
  }
  return removed;
}

}  // namespace holdfast::staging
