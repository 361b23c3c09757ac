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

Way WayOf(const SaveState& save, uint32_t index) {
  const layout::Extent& extent = save.table->extent(index);
  const bool device = HasDevicePiece(*save.table, extent);
  if (HasHostPiece(*save.table, extent)) return device ? Way::kMixed : Way::kHost;
  // Literals alone, that have to wait for a checksum: they must not hold memory meanwhile.
  const bool waits = save.checksums != nullptr && save.checksums->WaitsForDevice(index);
  return device || waits ? Way::kDevice : Way::kHost;
}

}  // namespace

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
  if (save->table->job()->extent_count == 0) {
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
      HOLDFAST_RETURN_IF_ERROR(segment.device->OrderAfter(segment.stream));
    }
  }
  return StageExtents(save);
}

bool Stager::MustLeaseInOrder(const SaveState& save) const {
  if (save.checksums == nullptr) return false;
  uint64_t waiting = 0;
  for (uint32_t i = 0; i < save.table->job()->extent_count; ++i) {
    if (HasHostPiece(*save.table, save.table->extent(i)) && save.checksums->WaitsForDevice(i))
      ++waiting;
  }
  // n leases of a chunk or less split the rest of the arena into n + 1 gaps at most: room for one
  // more chunk is certain while the arena has 2n + 1 of them.
  return 2 * waiting + 1 > pool_->arena().bytes() / kChunkBytes;
}

absl::Status Stager::StageExtents(const std::shared_ptr<SaveState>& save) {
  const JobTable& table = *save->table;
  const uint32_t count = table.job()->extent_count;
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
    if (ways[i] != Way::kDevice) HOLDFAST_RETURN_IF_ERROR(CopyHost(save, i, ways[i]));
    // At once, whatever else is still to come: in a save larger than the arena only its own extents
    // make room for the next ones.
    if (ways[i] != Way::kHost) devices_.Enqueue(save, i, /*leased=*/true);
  }
  // The others come last: the caller waits for the memory of the host's.
  for (uint32_t i = in_order ? host_end : 0; i < count; ++i) {
    if (ways[i] == Way::kDevice) devices_.Enqueue(save, i, /*leased=*/false);
  }
  return absl::OkStatus();
}

absl::Status Stager::CopyHost(const std::shared_ptr<SaveState>& save, uint32_t index, Way way) {
  const bool fused = options_.fused_copy && way == Way::kHost && save->checksums == nullptr;
  const absl::Time begin = absl::Now();
  absl::Status status = fused ? CopyFused(save.get(), index) : CopyHostPieces(save.get(), index);
  save->MutableReport()->time_copying += absl::ToDoubleSeconds(absl::Now() - begin);
  if (status.ok() && way == Way::kHost && !fused) sealer_->Enqueue(save, index);
  return status;
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
        "copy ", save.TensorName(pieces[i].tensor), " for ", save.checkpoint,
        ": it was changed while it was being copied, from byte ", at, " of ",
        save.plan.files[extent.file].name, " on; do not change tensors inside the save call"));
  }
  return absl::OkStatus();
}

}  // namespace holdfast::writer
