#include "runtime/writer/stager.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/base/clock.h"
#include "runtime/base/mutex.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/digest/digest.h"
#include "runtime/format/torch_zip.h"

namespace holdfast::writer {

namespace {

/// A tensor's piece in host memory: to be copied before the call returns. (A literal is the save's
/// own and can be copied at any time.)
bool HasHostPiece(const JobTable& table, const layout::Extent& extent) {
  const StagedPiece* pieces = table.pieces(extent);
  return std::any_of(pieces, pieces + extent.piece_count, [](const StagedPiece& piece) {
    return piece.device == nullptr && piece.tensor != Failure::kNoIndex;
  });
}

bool HasDevicePiece(const JobTable& table, const layout::Extent& extent) {
  const StagedPiece* pieces = table.pieces(extent);
  return std::any_of(pieces, pieces + extent.piece_count,
                     [](const StagedPiece& piece) { return piece.device != nullptr; });
}

void AddToCrc32(void* crc, const void* data, size_t bytes) {
  *static_cast<uint32_t*>(crc) = format::Crc32(*static_cast<uint32_t*>(crc), data, bytes);
}

Way WayOf(const SaveState& save, uint32_t index) {
  const layout::Extent& extent = save.table->extent(index);
  const bool device = HasDevicePiece(*save.table, extent);
  if (HasHostPiece(*save.table, extent)) return device ? Way::kMixed : Way::kHost;
  // Literals that wait for a checksum must not hold memory meanwhile.
  const bool waits = save.checksums != nullptr && save.checksums->WaitsForDevice(index);
  return device || waits ? Way::kDevice : Way::kHost;
}

}  // namespace

/// Copies of one call on other threads. The copies read the caller's tensors, so the call must not
/// return before their end.
class Stager::HelpedCopies {
 public:
  void Begin() {
    const base::MutexLock lock(&mutex_);
    ++under_way_;
  }
  void End(const absl::Status& status) {
    const base::MutexLock lock(&mutex_);
    status_.Update(status);
    if (--under_way_ == 0) ended_.NotifyAll();
  }
  /// Waits for all copies and returns the first failure.
  absl::Status Wait() {
    const base::MutexLock lock(&mutex_);
    while (under_way_ != 0) ended_.WaitUntil(&mutex_, base::Now() + absl::Hours(1));
    return status_;
  }

 private:
  base::Mutex mutex_;
  base::Condition ended_;
  uint32_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

Stager::Stager(staging::StagingPool* pool, Sealer* sealer, const StagerOptions& options)
    : pool_(pool),
      sealer_(sealer),
      options_(options),
      leases_(pool, options.time_memory_max),
      devices_(pool, sealer, &leases_) {}

absl::Status Stager::Stage(const std::shared_ptr<SaveState>& save) {
  absl::Status staged = StageAll(save);
  if (!staged.ok()) {
    save->FailStaging(staged);
    pool_->AbortEpoch(save->epoch);
  }
  return staged;
}

absl::Status Stager::StageAll(const std::shared_ptr<SaveState>& save) {
  if (save->table->extent_count() == 0) {
    pool_->FinishLeasing(save->epoch);
    save->MarkStaged(std::nullopt);
    return absl::OkStatus();
  }
  // Order every device behind the present work of its stream, before the trainer queues further
  // work.
  for (const auto& [device, stream] : save->streams) {
    HOLDFAST_RETURN_IF_ERROR(device->OrderAfter(stream));
  }
  return StageExtents(save);
}

bool Stager::MustLeaseInOrder(const SaveState& save) const {
  if (save.checksums == nullptr) return false;
  uint64_t waiting = 0;
  for (uint32_t i = 0; i < save.table->extent_count(); ++i) {
    if (HasHostPiece(*save.table, save.table->extent(i)) && save.checksums->WaitsForDevice(i))
      ++waiting;
  }
  // n leases of a chunk or less split the rest of the arena into n + 1 gaps at most: room for one
  // more chunk is certain while the arena has 2n + 1 chunks.
  return 2 * waiting + 1 > pool_->arena().bytes() / kChunkBytes;
}

absl::Status Stager::StageExtents(const std::shared_ptr<SaveState>& save) {
  const auto helped = std::make_shared<HelpedCopies>();
  absl::Status status = StageExtents(save, helped);
  if (base::Planted(base::Bug::kReturnWhileCopying)) return status;
  const absl::Time begin = base::Now();
  status.Update(helped->Wait());
  save->MutableReport()->time_copying += absl::ToDoubleSeconds(base::Now() - begin);
  return status;
}

absl::Status Stager::StageExtents(const std::shared_ptr<SaveState>& save,
                                  const std::shared_ptr<HelpedCopies>& helped) {
  const JobTable& table = *save->table;
  const uint32_t count = table.extent_count();
  std::vector<Way> ways(count);
  uint32_t host_end = 0;
  uint32_t device_extents = 0;
  for (uint32_t i = 0; i < count; ++i) {
    ways[i] = WayOf(*save, i);
    if (ways[i] != Way::kHost) ++device_extents;
    if (ways[i] != Way::kDevice) host_end = i + 1;
  }
  save->device_extents_to_queue.store(device_extents, std::memory_order_release);
  const bool in_order = MustLeaseInOrder(*save);
  for (uint32_t i = 0; i < host_end; ++i) {
    if (ways[i] == Way::kDevice && !in_order) continue;
    HOLDFAST_RETURN_IF_ERROR(leases_.Take(save.get(), i));
    if (ways[i] == Way::kHost && CopiesElsewhere(save, i, helped)) continue;
    if (ways[i] != Way::kDevice) HOLDFAST_RETURN_IF_ERROR(CopyHost(save, i, ways[i]));
    // At once, before the remaining extents: in a save larger than the arena only its own extents
    // make room for the next extents.
    if (ways[i] != Way::kHost) devices_.Enqueue(save, i, /*leased=*/true);
  }
  // The other device extents come last: the caller waits for the memory of host extents.
  for (uint32_t i = in_order ? host_end : 0; i < count; ++i) {
    if (ways[i] == Way::kDevice) devices_.Enqueue(save, i, /*leased=*/false);
  }
  return absl::OkStatus();
}

bool Stager::CopiesElsewhere(const std::shared_ptr<SaveState>& save, uint32_t index,
                             const std::shared_ptr<HelpedCopies>& helped) {
  // For fewer bytes waking a thread costs more than the copy.
  if (save->table->extent(index).bytes < kChunkBytes / 4) return false;
  helped->Begin();
  const bool taken = sealer_->TryCopy(save, index, [this, save, index, helped] {
    if (base::Planted(base::Bug::kReturnWhileCopying)) absl::SleepFor(absl::Milliseconds(50));
    absl::StatusOr<bool> sealed = true;
    if (!save->StagingFailed()) sealed = CopyHostPieces(save, index, Way::kHost);
    helped->End(sealed.status());
    return sealed.ok() && !*sealed;
  });
  if (!taken) helped->End(absl::OkStatus());
  return taken;
}

absl::Status Stager::CopyHost(const std::shared_ptr<SaveState>& save, uint32_t index, Way way) {
  const absl::Time begin = base::Now();
  const absl::StatusOr<bool> sealed = CopyHostPieces(save, index, way);
  save->MutableReport()->time_copying += absl::ToDoubleSeconds(base::Now() - begin);
  if (sealed.ok() && way == Way::kHost && !*sealed) sealer_->Enqueue(save, index);
  return sealed.status();
}

absl::StatusOr<bool> Stager::CopyHostPieces(const std::shared_ptr<SaveState>& save, uint32_t index,
                                            Way way) {
  if (options_.fused_copy && way == Way::kHost) return CopyFused(save, index);
  const layout::Extent& extent = save->table->extent(index);
  const StagedPiece* pieces = save->table->pieces(extent);
  char* memory = pool_->arena().base() + extent.arena_offset;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (pieces[i].device == nullptr)
      std::memcpy(memory + pieces[i].offset, pieces[i].data, pieces[i].bytes);
  }
  if (options_.second_look) HOLDFAST_RETURN_IF_ERROR(LookAgain(*save, index));
  return false;
}

absl::StatusOr<bool> Stager::CopyFused(const std::shared_ptr<SaveState>& save, uint32_t index) {
  const layout::Extent& extent = save->table->extent(index);
  const StagedPiece* pieces = save->table->pieces(extent);
  Checksums* const checksums = save->checksums.get();
  char* memory = pool_->arena().base() + extent.arena_offset;
  BegunDigest begun;
  bool may_digest = true;  // no checksum is missing so far
  bool added = false;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    const StagedPiece& piece = pieces[i];
    digest::Stream part;
    digest::Stream* const wanted_part = piece.has_digest ? &part : nullptr;
    char* const to = memory + piece.offset;
    if (checksums != nullptr && checksums->HasPlaces(index, piece.offset, piece.bytes)) {
      std::memcpy(to, piece.data, piece.bytes);
      may_digest = may_digest && checksums->Fill(index, piece.offset, piece.bytes, memory);
      if (may_digest) {
        begun.whole.Update(to, piece.bytes);
        part.Update(to, piece.bytes);
      }
    } else {
      uint32_t crc = 0;
      const bool wants_crc = checksums != nullptr && checksums->Wants(index, piece.offset);
      digest::Tap tap;
      if (wants_crc) tap = {.take = AddToCrc32, .state = &crc};
      digest::CopyAndDigest(to, piece.data, piece.bytes, may_digest ? &begun.whole : nullptr,
                            wanted_part, tap);
      if (wants_crc) checksums->Add(index, piece.offset, crc);
      added = added || wants_crc;
    }
    if (wanted_part != nullptr) *save->table->digest_of(extent, i) = part.Finish();
    if (may_digest) begun.bytes += piece.bytes;
  }
  if (added) {
    for (const uint32_t other : checksums->Ready()) sealer_->Enqueue(save, other);
  }
  if (options_.second_look) HOLDFAST_RETURN_IF_ERROR(LookAgain(*save, index));
  if (may_digest) {
    sealer_->SealDigested(save, index, begun.whole.Finish());
  } else {
    checksums->Keep(index, begun);
  }
  return may_digest;
}

absl::Status Stager::LookAgain(const SaveState& save, uint32_t index) const {
  const layout::Extent& extent = save.table->extent(index);
  const StagedPiece* pieces = save.table->pieces(extent);
  const char* memory = pool_->arena().base() + extent.arena_offset;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    // Literals are not the trainer's, and have their checksums by now.
    if (pieces[i].device != nullptr || pieces[i].tensor == Failure::kNoIndex) continue;
    const char* staged = memory + pieces[i].offset;
    if (std::memcmp(staged, pieces[i].data, pieces[i].bytes) == 0) continue;
    const char* first = std::mismatch(staged, staged + pieces[i].bytes, pieces[i].data).first;
    const uint64_t at =
        extent.file_offset + pieces[i].offset + static_cast<uint64_t>(first - staged);
    return absl::DataLossError(absl::StrCat(
        "copy ", save.TensorName(pieces[i].tensor), " for ", save.checkpoint,
        ": it was changed while it was being copied, from byte ", at, " of ",
        save.plan->files[extent.file].name, " on; do not change tensors inside the save call"));
  }
  return absl::OkStatus();
}

}  // namespace holdfast::writer
