#include "runtime/writer/stager.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/digest/digest.h"

namespace holdfast::writer {
namespace {

// How long a wait for memory sleeps before it looks whether the save failed or must start to
// stream.
constexpr absl::Duration kMemoryStep = absl::Milliseconds(50);
// How long the device thread sleeps on the oldest copy before it looks for memory again.
constexpr absl::Duration kCopyStep = absl::Milliseconds(5);

/// A tensor's piece in host memory: to be copied before the call returns. (A literal is the save's
/// own and can be copied at any time.)
bool HasHostPiece(const JobTable& table, const layout::Extent& extent) {
  const PieceSource* sources = table.sources(extent);
  const layout::Piece* pieces = table.pieces(extent);
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (sources[i].device == nullptr && pieces[i].tensor != Failure::kNoIndex) return true;
  }
  return false;
}

bool HasDevicePiece(const JobTable& table, const layout::Extent& extent) {
  const PieceSource* sources = table.sources(extent);
  return std::any_of(sources, sources + extent.piece_count,
                     [](const PieceSource& s) { return s.device != nullptr; });
}

std::string TensorName(const SaveState& save, uint32_t tensor) {
  return tensor < save.plan.tensors.size()
             ? absl::StrCat("tensor \"", save.plan.tensors[tensor].name, "\"")
             : std::string("the file's header");
}

}  // namespace

Stager::Stager(staging::StagingPool* pool, Sealer* sealer, const StagerOptions& options)
    : pool_(pool), sealer_(sealer), options_(options), device_thread_([this] { RunDevice(); }) {}

Stager::~Stager() {
  {
    const base::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  device_thread_.join();
}

absl::Status Stager::Stage(const std::shared_ptr<SaveState>& save) {
  const layout::Job& job = *save->table->job();
  std::vector<uint32_t> device;
  if (job.extent_count == 0) {
    pool_->FinishLeasing(save->epoch);
    save->MarkStaged();
    return absl::OkStatus();
  }
  // Order every device behind what its stream holds now, before anything else of the trainer's is
  // queued on it.
  std::set<std::pair<Device*, StreamHandle>> streams;
  for (const PlannedFile& file : save->plan.files) {
    for (const Segment& segment : file.segments) {
      if (segment.device == nullptr || segment.device->is_host()) continue;
      if (!streams.insert({segment.device, segment.stream}).second) continue;
      const absl::Status ordered = segment.device->OrderAfter(segment.stream);
      if (!ordered.ok()) {
        save->FailStaging(ordered);
        return ordered;
      }
    }
  }
  absl::Status staged = StageHost(save.get(), save, &device);
  if (!staged.ok()) {
    save->FailStaging(staged);
    pool_->AbortEpoch(save->epoch);
    return staged;
  }
  return absl::OkStatus();
}

absl::Status Stager::StageHost(SaveState* save, const std::shared_ptr<SaveState>& shared,
                               std::vector<uint32_t>* device) {
  const layout::Job& job = *save->table->job();
  // Extents with a device piece go to the device thread: at once those that have no host piece, so
  // that their copies run beside ours; the mixed ones after their host part.
  DeviceSave work{.save = shared, .waiting = {}, .copying = {}};
  for (uint32_t i = 0; i < job.extent_count; ++i) {
    const layout::Extent& extent = save->table->extent(i);
    if (HasDevicePiece(*save->table, extent)) device->push_back(i);
  }
  save->device_extents_to_queue.store(static_cast<uint32_t>(device->size()),
                                      std::memory_order_release);
  absl::Status status;
  for (uint32_t i = 0; i < job.extent_count && status.ok(); ++i) {
    const layout::Extent& extent = save->table->extent(i);
    const bool mixed = HasDevicePiece(*save->table, extent);
    if (mixed && !HasHostPiece(*save->table, extent)) {
      work.waiting.push_back({.index = i, .leased = false, .copies = {}});
      continue;
    }
    absl::StatusOr<staging::Lease> lease = Acquire(save, i, absl::Now() + options_.time_memory_max);
    if (!lease.ok()) return lease.status();
    TakeLease(save, i, *lease);
    const absl::Time begin = absl::Now();
    const bool fused = options_.fused_copy && !mixed && save->checksums == nullptr;
    if (fused) {
      status = CopyFused(save, i);
    } else {
      status = CopyHostPieces(save, i);
    }
    save->MutableReport()->time_copying += absl::ToDoubleSeconds(absl::Now() - begin);
    if (!status.ok()) break;
    if (mixed) {
      // Ahead of the unleased ones: it holds memory already.
      work.waiting.push_front({.index = i, .leased = true, .copies = {}});
    } else if (!fused) {
      sealer_->Enqueue(shared, i);
    }
  }
  if (!status.ok() || work.waiting.empty()) return status;
  save->AddUser();  // until the device thread is done with it
  const base::MutexLock lock(&mutex_);
  queue_.push_back(std::move(work));
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::StatusOr<staging::Lease> Stager::Acquire(SaveState* save, uint32_t index,
                                               absl::Time deadline) {
  const uint32_t bytes = static_cast<uint32_t>(layout::AlignUp(save->table->extent(index).bytes));
  const absl::Time begin = absl::Now();
  absl::StatusOr<staging::Lease> lease = pool_->TryAcquire(save->epoch, bytes);
  while (!lease.ok() &&
         (absl::IsUnavailable(lease.status()) || absl::IsDeadlineExceeded(lease.status()))) {
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("wait for staging memory for ", save->checkpoint, ": the arena of ",
                       pool_->arena().bytes(),
                       " bytes is held by earlier saves; raise arena_bytes, save less often, or "
                       "use another when_full policy"));
    }
    if (save->StagingFailed()) return absl::AbortedError("staging stopped: the save has failed");
    // Nobody else holds a byte, and still there is no room: only this save's own bytes can make
    // some.
    if (!save->streamed.load(std::memory_order_relaxed) && pool_->HoldsAlone(save->epoch)) {
      save->streamed.store(true, std::memory_order_relaxed);
      save->wake_supervisor();
    }
    lease = pool_->Acquire(save->epoch, bytes, std::min(deadline, absl::Now() + kMemoryStep));
  }
  save->MutableReport()->time_waiting_memory += absl::ToDoubleSeconds(absl::Now() - begin);
  return lease;
}

void Stager::TakeLease(SaveState* save, uint32_t index, const staging::Lease& lease) {
  save->leases[index] = lease;
  save->table->extent(index).arena_offset = lease.offset;
  if (save->extents_to_lease.fetch_sub(1, std::memory_order_acq_rel) == 1)
    pool_->FinishLeasing(save->epoch);
}

absl::Status Stager::CopyHostPieces(SaveState* save, uint32_t index) {
  const layout::Extent& extent = save->table->extent(index);
  const layout::Piece* pieces = save->table->pieces(extent);
  const PieceSource* sources = save->table->sources(extent);
  char* memory = pool_->arena().base() + extent.arena_offset;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (sources[i].device == nullptr)
      std::memcpy(memory + pieces[i].offset, sources[i].data, pieces[i].bytes);
  }
  return options_.second_look ? LookAgain(*save, index) : absl::OkStatus();
}

absl::Status Stager::CopyFused(SaveState* save, uint32_t index) {
  const layout::Extent& extent = save->table->extent(index);
  layout::Piece* pieces = save->table->pieces(extent);
  const PieceSource* sources = save->table->sources(extent);
  char* memory = pool_->arena().base() + extent.arena_offset;
  digest::Stream whole;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    digest::Stream part;
    digest::CopyAndDigest(memory + pieces[i].offset, sources[i].data, pieces[i].bytes, &whole,
                          pieces[i].has_digest != 0 ? &part : nullptr);
    if (pieces[i].has_digest != 0) pieces[i].digest = part.Finish();
  }
  if (options_.second_look) HOLDFAST_RETURN_IF_ERROR(LookAgain(*save, index));
  sealer_->SealDigested(save, index, whole.Finish());
  return absl::OkStatus();
}

absl::Status Stager::LookAgain(const SaveState& save, uint32_t index) const {
  const layout::Extent& extent = save.table->extent(index);
  const layout::Piece* pieces = save.table->pieces(extent);
  const PieceSource* sources = save.table->sources(extent);
  const char* memory = pool_->arena().base() + extent.arena_offset;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (sources[i].device != nullptr) continue;
    const char* staged = memory + pieces[i].offset;
    if (std::memcmp(staged, sources[i].data, pieces[i].bytes) == 0) continue;
    const char* first = std::mismatch(staged, staged + pieces[i].bytes, sources[i].data).first;
    const uint64_t at =
        extent.file_offset + pieces[i].offset + static_cast<uint64_t>(first - staged);
    return absl::DataLossError(absl::StrCat(
        "copy ", TensorName(save, pieces[i].tensor), " for ", save.checkpoint,
        ": it was changed while it was being copied, from byte ", at, " of ",
        save.plan.files[extent.file].name, " on; do not change tensors inside the save call"));
  }
  return absl::OkStatus();
}

void Stager::RunDevice() {
  while (true) {
    DeviceSave work;
    {
      const base::MutexLock lock(&mutex_);
      while (queue_.empty() && !stopping_)
        changed_.WaitUntil(&mutex_, absl::Now() + absl::Hours(1));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    const absl::Status status = StageDevice(&work);
    if (!status.ok()) {
      work.save->FailStaging(status);
      pool_->AbortEpoch(work.save->epoch);
      // A device may still write the leases: they stay in use until the last copy has ended,
      // whatever it ended with.
      for (DeviceExtent& extent : work.copying) {
        for (auto& [device, ticket] : extent.copies) {
          while (absl::IsDeadlineExceeded(device->Wait(ticket, absl::Seconds(1)))) {
          }
        }
      }
    }
    work.save->DropUser();
  }
}

absl::Status Stager::StageDevice(DeviceSave* work) {
  SaveState* save = work->save.get();
  const absl::Time deadline = absl::Now() + options_.time_memory_max;
  absl::Time last_progress = absl::Now();
  while (!work->waiting.empty() || !work->copying.empty()) {
    if (save->StagingFailed()) return absl::AbortedError("staging stopped: the save has failed");
    bool progressed = false;
    if (!work->waiting.empty()) {
      DeviceExtent& next = work->waiting.front();
      if (!next.leased) {
        const uint32_t bytes =
            static_cast<uint32_t>(layout::AlignUp(save->table->extent(next.index).bytes));
        absl::StatusOr<staging::Lease> lease = pool_->TryAcquire(save->epoch, bytes);
        if (!lease.ok() && absl::IsUnavailable(lease.status()) && work->copying.empty()) {
          // Nothing of ours is under way that would make room here: wait for the worker, or for
          // earlier saves.
          lease = Acquire(save, next.index,
                          std::max(deadline, last_progress + options_.time_memory_max));
        }
        if (lease.ok()) {
          TakeLease(save, next.index, *lease);
          next.leased = true;
        } else if (!absl::IsUnavailable(lease.status())) {
          return lease.status();
        }
      }
      if (next.leased) {
        work->copying.push_back(std::move(next));
        work->waiting.pop_front();
        HOLDFAST_RETURN_IF_ERROR(StartCopies(save, &work->copying.back()));
        if (save->device_extents_to_queue.fetch_sub(1, std::memory_order_acq_rel) == 1)
          save->NotifyQueued();
        progressed = true;
      }
    }
    if (!work->copying.empty()) {
      HOLDFAST_ASSIGN_OR_RETURN(const bool finished,
                                FinishOldest(work, progressed ? absl::ZeroDuration() : kCopyStep));
      progressed = progressed || finished;
    }
    if (progressed) last_progress = absl::Now();
  }
  return absl::OkStatus();
}

absl::Status Stager::StartCopies(SaveState* save, DeviceExtent* extent) {
  const layout::Extent& table_extent = save->table->extent(extent->index);
  const layout::Piece* pieces = save->table->pieces(table_extent);
  const PieceSource* sources = save->table->sources(table_extent);
  char* memory = pool_->arena().base() + table_extent.arena_offset;
  for (uint32_t i = 0; i < table_extent.piece_count; ++i) {
    if (sources[i].device == nullptr) {
      // A literal; of an extent with host tensors the caller's thread has copied all of these.
      if (pieces[i].tensor == Failure::kNoIndex) {
        std::memcpy(memory + pieces[i].offset, sources[i].data, pieces[i].bytes);
      }
      continue;
    }
    absl::StatusOr<CopyTicket> ticket =
        sources[i].device->CopyToHost(memory + pieces[i].offset, sources[i].data, pieces[i].bytes);
    if (!ticket.ok()) {
      return base::Annotate(ticket.status(),
                            absl::StrCat("copy ", TensorName(*save, pieces[i].tensor), " from ",
                                         sources[i].device->name()));
    }
    extent->copies.emplace_back(sources[i].device, *ticket);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Stager::FinishOldest(DeviceSave* work, absl::Duration timeout) {
  DeviceExtent& oldest = work->copying.front();
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
  return true;
}

}  // namespace holdfast::writer
