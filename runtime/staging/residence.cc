#include "runtime/staging/residence.h"

#include <algorithm>

#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"

namespace holdfast::staging {

absl::Status Residence::Register(Registrant* registrant) {
  const bool now = arena_->resident();
  if (now) HOLDFAST_RETURN_IF_ERROR(registrant->RestoreRegistration());
  entries_.push_back({.registrant = registrant, .registered = now});
  return absl::OkStatus();
}

void Residence::Remove(Registrant* registrant) {
  std::erase_if(entries_,
                [registrant](const Entry& entry) { return entry.registrant == registrant; });
}

bool Residence::Complete() const {
  return arena_->resident() && std::all_of(entries_.begin(), entries_.end(),
                                           [](const Entry& entry) { return entry.registered; });
}

bool Residence::Empty() const {
  return !arena_->resident() && std::none_of(entries_.begin(), entries_.end(),
                                             [](const Entry& entry) { return entry.registered; });
}

// A page punched under a registration lives on in the registration: the disk would get the old page
// while memory shows a new one, and no digest of memory could find the difference. So drop all
// registrations first, wait for each acknowledgment, and punch last.
absl::Status Residence::GiveBack() {
  if (base::Planted(base::Bug::kTrimUnderRegistration)) return arena_->Punch();
  absl::Status status = DropAll();
  if (status.ok()) status = arena_->Punch();
  if (status.ok()) return status;
  // The pages stayed. The next lease retries a failed restore.
  (void)RestoreAll();
  return base::Annotate(status, "trim staging memory");
}

absl::Status Residence::Take() {
  HOLDFAST_RETURN_IF_ERROR(arena_->Populate());
  return RestoreAll();
}

absl::Status Residence::DropAll() {
  for (Entry& entry : entries_) {
    if (!entry.registered) continue;
    HOLDFAST_RETURN_IF_ERROR(entry.registrant->DropRegistration());
    entry.registered = false;
  }
  return absl::OkStatus();
}

absl::Status Residence::RestoreAll() {
  absl::Status first_error;
  for (Entry& entry : entries_) {
    if (entry.registered) continue;
    const absl::Status status = entry.registrant->RestoreRegistration();
    entry.registered = status.ok();
    first_error.Update(status);
  }
  return first_error;
}

}  // namespace holdfast::staging
