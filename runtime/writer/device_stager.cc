#include "runtime/writer/device_stager.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"

namespace holdfast::writer {
namespace {

// The maximum sleep on the oldest copy, or on memory, before the next look at all saves.
constexpr absl::Duration kCopyStep = absl::Milliseconds(5);
constexpr absl::Duration kDeviceMemoryStep = absl::Milliseconds(10);

}  // namespace

DeviceStager::DeviceStager(staging::StagingPool* pool, Sealer* sealer, LeaseTaker* leases)
    : pool_(pool), sealer_(sealer), leases_(leases) {}

absl::Status DeviceStager::Start() {
  return thread_.Start([this] { Run(); });
}

DeviceStager::~DeviceStager() {
  {
    const base::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

void DeviceStager::Enqueue(std::shared_ptr<SaveState> save, uint32_t index, bool leased) {
  save->AddUser();
  const base::MutexLock lock(&mutex_);
  entries_.push_back({.save = std::move(save), .index = index, .leased = leased});
  changed_.NotifyAll();
}

bool DeviceStager::TakeEntries() {
  std::deque<Entry> entries;
  const bool all_failed =
      std::all_of(works_.begin(), works_.end(), [](const Work& work) { return work.failed(); });
  {
    const base::MutexLock lock(&mutex_);
    while (works_.empty() && entries_.empty() && !stopping_)
      changed_.WaitUntil(&mutex_, base::Now() + absl::Hours(1));
    entries.swap(entries_);
    if (stopping_ && entries.empty() && all_failed) return false;
  }
  // The copies of failed saves may never end.
  if (all_failed) progress_at_ = base::Now();
  for (Entry& entry : entries) {
    auto work = std::find_if(works_.begin(), works_.end(),
                             [&entry](const Work& w) { return w.save == entry.save; });
    if (work == works_.end()) {
      work = works_.insert(
          works_.end(),
          {.save = std::move(entry.save), .leased = {}, .unleased = {}, .copying = {}});
    }
    (entry.leased ? work->leased : work->unleased).push_back(entry.index);
  }
  return true;
}

void DeviceStager::Run() {
  while (TakeEntries()) {
    bool progressed = false;
    for (auto work = works_.begin(); work != works_.end();) {
      const absl::StatusOr<bool> step = Step(&*work);
      if (!step.ok()) Fail(&*work, step.status());
      progressed = progressed || !step.ok() || *step;
      work = work->empty() ? works_.erase(work) : std::next(work);
    }
    if (progressed) {
      progress_at_ = base::Now();
    } else {
      Rest();
    }
  }
}

absl::StatusOr<bool> DeviceStager::Step(Work* work) {
  SaveState* save = work->save.get();
  if (work->failed()) return GiveUp(work);
  bool progressed = false;
  if (!work->leased.empty()) {
    const uint32_t index = work->leased.front();
    work->leased.pop_front();
    HOLDFAST_RETURN_IF_ERROR(StartCopies(work, index));
    progressed = true;
  } else if (!work->unleased.empty()) {
    const uint32_t index = work->unleased.front();
    HOLDFAST_ASSIGN_OR_RETURN(const bool leased, leases_->TryTake(save, index));
    if (leased) {
      work->unleased.pop_front();
      work->leased.push_back(index);
      progressed = true;
    }
  }
  if (!work->copying.empty()) {
    HOLDFAST_ASSIGN_OR_RETURN(const bool finished, FinishOldest(work, absl::ZeroDuration()));
    progressed = progressed || finished;
  }
  return progressed;
}

void DeviceStager::Rest() {
  Work* next = nullptr;
  for (Work& work : works_) {
    if (work.failed()) continue;
    // A save that copies comes first; among saves that wait for memory the oldest comes first.
    if (next == nullptr ||
        (next->copying.empty() && (!work.copying.empty() || work.save->epoch < next->save->epoch)))
      next = &work;
  }
  if (next == nullptr) {
    const base::MutexLock lock(&mutex_);
    if (entries_.empty() && !stopping_) changed_.WaitUntil(&mutex_, base::Now() + kCopyStep);
    return;
  }
  const absl::Status status = RestWith(next);
  if (!status.ok()) Fail(next, status);
  works_.remove_if([](const Work& work) { return work.empty(); });
}

absl::Status DeviceStager::RestWith(Work* work) {
  if (!work->copying.empty()) return FinishOldest(work, kCopyStep).status();
  const uint32_t index = work->unleased.front();
  HOLDFAST_ASSIGN_OR_RETURN(const bool leased,
                            leases_->WaitAndTake(work->save.get(), index, kDeviceMemoryStep));
  if (!leased) return leases_->CheckWaitDeadline(*work->save, progress_at_);
  work->unleased.pop_front();
  work->leased.push_back(index);
  return absl::OkStatus();
}

absl::Status DeviceStager::StartCopies(Work* work, uint32_t index) {
  SaveState* save = work->save.get();
  const layout::Extent& extent = save->table->extent(index);
  const StagedPiece* pieces = save->table->pieces(extent);
  char* memory = pool_->arena().base() + extent.arena_offset;
  Copying& copying = work->copying.emplace_back(Copying{.index = index, .copies = {}});
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (pieces[i].device == nullptr) {
      // A literal; in an extent with host tensors the caller's thread has copied all literals.
      if (pieces[i].tensor == Failure::kNoIndex) {
        std::memcpy(memory + pieces[i].offset, pieces[i].data, pieces[i].bytes);
      }
      continue;
    }
    absl::StatusOr<CopyTicket> ticket =
        pieces[i].device->CopyToHost(memory + pieces[i].offset, pieces[i].data, pieces[i].bytes);
    if (!ticket.ok()) {
      return base::Annotate(ticket.status(),
                            absl::StrCat("copy ", save->TensorName(pieces[i].tensor), " from ",
                                         pieces[i].device->name()));
    }
    copying.copies.emplace_back(pieces[i].device, *ticket);
  }
  if (save->device_extents_to_queue.fetch_sub(1, std::memory_order_acq_rel) == 1)
    save->NotifyQueued();
  return absl::OkStatus();
}

absl::StatusOr<bool> DeviceStager::FinishOldest(Work* work, absl::Duration timeout) {
  Copying& oldest = work->copying.front();
  while (!oldest.copies.empty()) {
    auto& [device, ticket] = oldest.copies.back();
    absl::StatusOr<bool> done = device->IsDone(ticket);
    if (done.ok() && !*done && timeout > absl::ZeroDuration()) {
      const absl::Status waited = device->Wait(ticket, timeout);
      if (absl::IsDeadlineExceeded(waited)) return false;
      done = waited.ok() ? absl::StatusOr<bool>(true) : absl::StatusOr<bool>(waited);
    }
    if (!done.ok()) {
      return base::Annotate(done.status(), absl::StrCat("copy for ", work->save->checkpoint,
                                                        " from ", device->name()));
    }
    if (!*done) return false;
    oldest.copies.pop_back();
  }
  sealer_->Enqueue(work->save, oldest.index);
  work->copying.pop_front();
  work->save->DropUser();
  return true;
}

void DeviceStager::Fail(Work* work, const absl::Status& status) {
  SaveState* save = work->save.get();
  save->FailStaging(status);
  pool_->AbortEpoch(save->epoch);
}

bool DeviceStager::GiveUp(Work* work) {
  size_t users = work->leased.size() + work->unleased.size();
  work->leased.clear();
  work->unleased.clear();
  for (Copying& extent : work->copying) {
    std::erase_if(extent.copies, [](const auto& copy) {
      const absl::StatusOr<bool> done = copy.first->IsDone(copy.second);
      return done.ok() ? *done : absl::IsAborted(done.status());
    });
  }
  users +=
      std::erase_if(work->copying, [](const Copying& extent) { return extent.copies.empty(); });
  for (size_t i = 0; i < users; ++i) work->save->DropUser();
  return users != 0;
}

}  // namespace holdfast::writer
