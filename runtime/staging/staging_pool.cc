#include "runtime/staging/staging_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/check.h"
#include "runtime/base/keep_forever.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/sys/system.h"

namespace holdfast::staging {
namespace {

absl::Status Gone(uint64_t epoch) {
  return absl::AbortedError(absl::StrCat("take staging memory for save ", epoch,
                                         ": the save was cancelled or has failed"));
}

absl::Duration Since(uint64_t then_ns) { return absl::Nanoseconds(sys::NowNs() - then_ns); }

}  // namespace

absl::StatusOr<std::unique_ptr<StagingPool>> StagingPool::Create(const StagingOptions& options) {
  HOLDFAST_CHECK(options.arena_bytes >= kArenaBytesMin, "ValidateOptions refuses a smaller arena");
  HOLDFAST_ASSIGN_OR_RETURN(std::unique_ptr<Arena> arena,
                            Arena::Create({.bytes = options.arena_bytes,
                                           .pages = options.pages,
                                           .threads = std::max(1u, options.threads)}));
  return std::unique_ptr<StagingPool>(new StagingPool(std::move(arena), options));
}

StagingPool::StagingPool(std::unique_ptr<Arena> arena, const StagingOptions& options)
    : arena_(std::move(arena)),
      control_bytes_max_(options.control_bytes_max),
      on_released_(options.on_released),
      residence_(arena_.get()),
      allocator_(arena_->bytes(), kIoAlignment),
      idle_since_ns_(sys::NowNs()) {}

StagingPool::~StagingPool() {
  // In a foreign child the mapping is absent, and the parent owns the registrants; the arena
  // checks for a foreign child itself.
  if (!guard_.InCreator()) return;
  // A worker's thread may be reading, or a device writing: keep the memory mapped.
  if (bytes_held_ != 0 || !residence_.DropAll().ok()) base::KeepForever(std::move(arena_));
}

uint64_t StagingPool::OpenEpoch() {
  const base::MutexLock lock(&mutex_);
  epochs_.emplace(next_epoch_, Epoch());
  return next_epoch_++;
}

absl::Status StagingPool::Prepare() {
  const base::MutexLock lock(&mutex_);
  AwaitSteady();
  if (residence_.Complete()) return absl::OkStatus();
  return Unlocked([this] { return residence_.Take(); });
}

bool StagingPool::WouldWait(uint64_t bytes) const {
  const base::MutexLock lock(&mutex_);
  if (EpochAtTurn() != nullptr) return true;
  const uint64_t quarantined = BytesQuarantined();
  // With no other save in flight the save streams through the free bytes.
  const uint64_t least = std::min(AlignUp(bytes), uint64_t{kChunkBytes});
  const uint64_t wanted = bytes_held_ == quarantined ? least : AlignUp(bytes);
  return bytes_held_ != 0 && wanted > allocator_.CertainBytes(kChunkBytes);
}

bool StagingPool::HoldsAlone(uint64_t epoch) const {
  const base::MutexLock lock(&mutex_);
  const auto self = epochs_.find(epoch);
  if (self == epochs_.end() || EpochAtTurn() != &self->second) return false;
  return std::all_of(epochs_.begin(), epochs_.end(), [epoch](const auto& entry) {
    return entry.first == epoch || entry.second.bytes_held == 0 ||
           !entry.second.quarantined.empty();
  });
}

absl::StatusOr<Lease> StagingPool::Acquire(uint64_t epoch, uint32_t bytes, absl::Time deadline) {
  HOLDFAST_CHECK(bytes > 0 && bytes <= kChunkBytes, "a lease is one chunk at most");
  const base::MutexLock lock(&mutex_);
  Epoch* self = Find(epoch);
  if (self == nullptr) return Gone(epoch);
  const uint64_t ticket = AddTicket(self);
  const uint64_t begin_ns = sys::NowNs();
  bool waited = false;
  bool in_time = true;
  absl::StatusOr<std::optional<Lease>> lease = std::nullopt;
  while (true) {
    lease = TakeIfPossible(epoch, ticket, bytes);
    if (!lease.ok() || lease->has_value() || !in_time) break;
    waited = true;
    in_time = changed_.WaitUntil(&mutex_, deadline);
  }
  RemoveTicket(epoch, ticket);
  if (waited) time_waiting_ += Since(begin_ns);
  if (!lease.ok()) return lease.status();
  if (!lease->has_value()) return absl::DeadlineExceededError(WhyWaiting(epoch, bytes));
  if (waited) ++waits_;
  return **lease;
}

absl::StatusOr<Lease> StagingPool::TryAcquire(uint64_t epoch, uint32_t bytes) {
  HOLDFAST_CHECK(bytes > 0 && bytes <= kChunkBytes, "a lease is one chunk at most");
  const base::MutexLock lock(&mutex_);
  Epoch* self = Find(epoch);
  if (self == nullptr) return Gone(epoch);
  const uint64_t ticket = AddTicket(self);
  const absl::StatusOr<std::optional<Lease>> lease = TakeIfPossible(epoch, ticket, bytes);
  RemoveTicket(epoch, ticket);
  if (!lease.ok()) return lease.status();
  if (!lease->has_value()) return absl::UnavailableError(WhyWaiting(epoch, bytes));
  return **lease;
}

void StagingPool::FinishLeasing(uint64_t epoch) {
  const base::MutexLock lock(&mutex_);
  if (Epoch* self = Find(epoch); self != nullptr) self->leasing_done = true;
  changed_.NotifyAll();
}

void StagingPool::AbortEpoch(uint64_t epoch) {
  const base::MutexLock lock(&mutex_);
  if (Epoch* self = Find(epoch); self != nullptr) self->aborted = self->leasing_done = true;
  changed_.NotifyAll();
}

void StagingPool::Seal(const Lease& lease) {
  Move(lease, LeaseState::kFilling, LeaseState::kSealed);
}
void StagingPool::StartWriting(const Lease& lease) {
  Move(lease, LeaseState::kSealed, LeaseState::kWriting);
}

bool StagingPool::Release(const Lease& lease) {
  const base::MutexLock lock(&mutex_);
  if (!leases_.Is(lease, LeaseState::kWriting)) return false;
  leases_.Move(lease, LeaseState::kWriting, LeaseState::kFree);
  GiveBack(lease);
  changed_.NotifyAll();
  return true;
}

void StagingPool::Retire(uint64_t epoch) {
  const base::MutexLock lock(&mutex_);
  HOLDFAST_CHECK(Find(epoch) != nullptr, "an epoch ends once");
  for (const Lease& lease : leases_.RemoveAll(epoch)) GiveBack(lease);
  epochs_.erase(epoch);
  if (epochs_.empty()) idle_since_ns_ = sys::NowNs();
  changed_.NotifyAll();
}

void StagingPool::Quarantine(uint64_t epoch, const std::string& why) {
  HOLDFAST_CHECK(!why.empty(), "quarantined bytes have a reason");
  const base::MutexLock lock(&mutex_);
  Epoch* self = Find(epoch);
  HOLDFAST_CHECK(self != nullptr, "an epoch that has retired holds nothing to quarantine");
  self->quarantined = why;
  self->aborted = self->leasing_done = true;
  changed_.NotifyAll();
}

absl::Status StagingPool::TakeControlBytes(uint64_t bytes) {
  const base::MutexLock lock(&mutex_);
  if (bytes > control_bytes_max_ - control_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "take ", bytes, " bytes of control memory: ", control_bytes_, " of ", control_bytes_max_,
        " are held by saves in flight; raise StagingOptions::control_bytes_max"));
  }
  control_bytes_ += bytes;
  control_bytes_peak_ = std::max(control_bytes_peak_, control_bytes_);
  return absl::OkStatus();
}

void StagingPool::ReturnControlBytes(uint64_t bytes) {
  const base::MutexLock lock(&mutex_);
  HOLDFAST_CHECK(bytes <= control_bytes_, "more control memory returned than was taken");
  control_bytes_ -= bytes;
}

absl::Status StagingPool::Register(Registrant* registrant) {
  const base::MutexLock lock(&mutex_);
  AwaitSteady();
  return Unlocked([this, registrant] { return residence_.Register(registrant); });
}

void StagingPool::AddRegistrant(Registrant* registrant) {
  const base::MutexLock lock(&mutex_);
  AwaitSteady();
  residence_.Add(registrant);
}

void StagingPool::RemoveRegistrant(Registrant* registrant) {
  const base::MutexLock lock(&mutex_);
  AwaitSteady();
  residence_.Remove(registrant);
}

absl::Status StagingPool::Trim() {
  const base::MutexLock lock(&mutex_);
  AwaitSteady();
  if (!epochs_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("trim staging memory: ", bytes_held_, " bytes are held by ",
                     base::Counted(epochs_.size(), "save"), " in flight"));
  }
  if (residence_.Empty()) return absl::OkStatus();
  const absl::Status status = Unlocked([this] { return residence_.GiveBack(); });
  if (status.ok()) ++trims_;
  return status;
}

absl::Duration StagingPool::IdleFor() const {
  const base::MutexLock lock(&mutex_);
  return epochs_.empty() ? Since(idle_since_ns_) : absl::ZeroDuration();
}

StagingStats StagingPool::stats() const {
  const base::MutexLock lock(&mutex_);
  StagingStats stats = {.arena_bytes = arena_->bytes(),
                        .bytes_held = bytes_held_,
                        .bytes_held_peak = bytes_held_peak_,
                        .bytes_quarantined = BytesQuarantined(),
                        .control_bytes_held = control_bytes_,
                        .control_bytes_peak = control_bytes_peak_,
                        .leases = leases_.added(),
                        .waits = waits_,
                        .time_waiting = time_waiting_,
                        .trims = trims_,
                        // Pages count as resident until a trim completes.
                        .resident = arena_->resident() || changing_,
                        .pages = arena_->pages(),
                        .page_bytes = arena_->page_bytes(),
                        .pages_reason = arena_->reason()};
  for (const auto& [epoch, self] : epochs_) {
    stats.epochs.push_back(
        {.epoch = epoch,
         .bytes_held = self.bytes_held,
         .age = self.first_lease_ns == 0 ? absl::ZeroDuration() : Since(self.first_lease_ns),
         .quarantined = self.quarantined});
  }
  return stats;
}

// Returns the epoch, null when retired.
StagingPool::Epoch* StagingPool::Find(uint64_t epoch) {
  HOLDFAST_CHECK(epoch > 0 && epoch < next_epoch_, "an epoch that was never opened");
  const auto found = epochs_.find(epoch);
  return found == epochs_.end() ? nullptr : &found->second;
}

uint64_t StagingPool::BytesQuarantined() const {
  uint64_t bytes = 0;
  for (const auto& [epoch, self] : epochs_) {
    if (!self.quarantined.empty()) bytes += self.bytes_held;
  }
  return bytes;
}

// Returns the oldest epoch that may still ask for leases; only this epoch gets leases. Earlier
// epochs hold all leases that they need and end without more memory: saves cannot deadlock on the
// cap.
const StagingPool::Epoch* StagingPool::EpochAtTurn() const {
  for (const auto& [epoch, self] : epochs_) {
    if (!self.leasing_done) return &self;
  }
  return nullptr;
}

uint64_t StagingPool::AddTicket(Epoch* self) {
  self->tickets.push_back(++last_ticket_);
  return last_ticket_;
}

void StagingPool::RemoveTicket(uint64_t epoch, uint64_t ticket) {
  Epoch* self = Find(epoch);
  if (self == nullptr) return;
  std::erase(self->tickets, ticket);
  if (!self->tickets.empty()) changed_.NotifyAll();  // The next ticket may be first now.
}

// Returns nothing when the ticket has to wait. May release the lock while reallocating pages; the
// ticket keeps its place.
absl::StatusOr<std::optional<Lease>> StagingPool::TakeIfPossible(uint64_t epoch, uint64_t ticket,
                                                                 uint32_t bytes) {
  Epoch* self = Find(epoch);
  if (self == nullptr || self->aborted) return Gone(epoch);
  if (self->leasing_done) {
    return absl::FailedPreconditionError(
        absl::StrCat("take staging memory for save ", epoch, ": it had all it asked for"));
  }
  if (EpochAtTurn() != self || self->tickets.front() != ticket || changing_) return std::nullopt;
  if (!residence_.Complete()) {
    HOLDFAST_RETURN_IF_ERROR(Unlocked([this] { return residence_.Take(); }));
    self = Find(epoch);
    if (self == nullptr || self->aborted) return Gone(epoch);
  }
  const std::optional<uint64_t> offset = allocator_.Allocate(bytes);
  if (!offset.has_value()) return std::nullopt;
  const uint32_t held = static_cast<uint32_t>(AlignUp(bytes));
  bytes_held_ += held;
  bytes_held_peak_ = std::max(bytes_held_peak_, bytes_held_);
  self->bytes_held += held;
  if (self->first_lease_ns == 0) self->first_lease_ns = sys::NowNs();
  return leases_.Add({.bytes = held, .offset = *offset, .epoch = epoch});
}

void StagingPool::Move(const Lease& lease, LeaseState from, LeaseState to) {
  const base::MutexLock lock(&mutex_);
  leases_.Move(lease, from, to);
}

// Frees the bytes of a lease removed from the table.
void StagingPool::GiveBack(const Lease& lease) {
  if (on_released_) on_released_(arena_->base() + lease.offset, lease.bytes);
  allocator_.Free(lease.offset, lease.bytes);
  bytes_held_ -= lease.bytes;
  Find(lease.epoch)->bytes_held -= lease.bytes;
}

// Runs slow work on residence_, exclusively and without the lock: stats and edges of leases do
// not wait.
template <typename Work>
absl::Status StagingPool::Unlocked(Work work) {
  changing_ = true;
  mutex_.Unlock();
  absl::Status status = work();
  mutex_.Lock();
  changing_ = false;
  changed_.NotifyAll();
  return status;
}

void StagingPool::AwaitSteady() {
  // Bounded by the registrants' deadlines and by page allocation.
  while (changing_) changed_.WaitUntil(&mutex_, absl::InfiniteFuture());
}

std::string StagingPool::WhyWaiting(uint64_t epoch, uint32_t bytes) const {
  std::string text = absl::StrCat("take ", bytes, " bytes of staging memory for save ", epoch, ": ",
                                  bytes_held_, " of ", arena_->bytes(), " are held");
  for (const auto& [other, self] : epochs_) {
    if (other < epoch && !self.leasing_done)
      absl::StrAppend(&text, ", save ", other, " goes first");
  }
  if (const uint64_t quarantined = BytesQuarantined(); quarantined > 0)
    absl::StrAppend(&text, ", ", quarantined, " of them quarantined");
  return text;
}

}  // namespace holdfast::staging
