#include "runtime/writer/lease_taker.h"

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/layout/job.h"

namespace holdfast::writer {
namespace {

// How long a wait for memory sleeps before it looks whether the save failed or must start to
// stream.
constexpr absl::Duration kMemoryStep = absl::Milliseconds(50);

uint32_t LeaseBytes(const SaveState& save, uint32_t index) {
  return static_cast<uint32_t>(AlignUp(save.table->extent(index).bytes));
}

bool NoRoom(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

absl::StatusOr<bool> LeaseTaker::TryTake(SaveState* save, uint32_t index) {
  const absl::StatusOr<staging::Lease> lease =
      pool_->TryAcquire(save->epoch, LeaseBytes(*save, index));
  if (lease.ok()) {
    Note(save, index, *lease);
    return true;
  }
  if (!NoRoom(lease.status())) return lease.status();
  save->table->job()->memory_waits.fetch_add(1, std::memory_order_relaxed);
  return false;
}

absl::StatusOr<bool> LeaseTaker::WaitAndTake(SaveState* save, uint32_t index,
                                             absl::Duration timeout) {
  HOLDFAST_ASSIGN_OR_RETURN(const bool taken, TryTake(save, index));
  if (taken) return true;
  // No other save holds a byte, and still there is no room: only this save's own bytes can make
  // room.
  layout::Job* const job = save->table->job();
  if (!layout::Streams(*job) && pool_->HoldsAlone(save->epoch)) {
    if (!layout::Claim(job, layout::Written::kReleased)) {
      return absl::ResourceExhaustedError(
          "an fsync failed, so that all of its staging memory is needed to write it once more, and "
          "there is no room for the rest of it; raise arena_bytes");
    }
    save->wake_supervisor();
  }
  const absl::Time begin = base::Now();
  const absl::StatusOr<staging::Lease> lease =
      pool_->Acquire(save->epoch, LeaseBytes(*save, index), begin + timeout);
  save->time_waiting_memory_ns.fetch_add(
      static_cast<uint64_t>(absl::ToInt64Nanoseconds(base::Now() - begin)),
      std::memory_order_relaxed);
  if (lease.ok()) {
    Note(save, index, *lease);
    return true;
  }
  if (NoRoom(lease.status())) return false;
  return lease.status();
}

absl::Status LeaseTaker::Take(SaveState* save, uint32_t index) {
  const absl::Time begin = base::Now();
  while (true) {
    HOLDFAST_ASSIGN_OR_RETURN(const bool taken, WaitAndTake(save, index, kMemoryStep));
    if (taken) return absl::OkStatus();
    if (save->StagingFailed()) return absl::AbortedError("staging stopped: the save has failed");
    HOLDFAST_RETURN_IF_ERROR(CheckWaitDeadline(*save, begin));
  }
}

absl::Status LeaseTaker::CheckWaitDeadline(const SaveState& save, absl::Time since) const {
  if (base::Now() - since < time_memory_max_) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(
      "wait for staging memory for ", save.checkpoint, ": the arena of ", pool_->arena().bytes(),
      " bytes is held by earlier saves; raise arena_bytes, save less often, or use "
      "another when_full policy"));
}

void LeaseTaker::Note(SaveState* save, uint32_t index, const staging::Lease& lease) {
  save->leases[index] = lease;
  save->table->SetArenaOffset(index, lease.offset);
  if (save->extents_to_lease.fetch_sub(1, std::memory_order_acq_rel) == 1)
    pool_->FinishLeasing(save->epoch);
}

}  // namespace holdfast::writer
