// Checks a job table once, before its first use.
//
// The table comes from the same build's trainer (by its version), so the checks find mistakes of a
// table builder, not an attacker. Later uses index without checks.
#include "runtime/layout/job.h"

#include <cstddef>

#include "runtime/layout/launcher.h"

namespace holdfast::layout {
namespace {

constexpr uint32_t kFilesMax = 1u << 20;
constexpr uint32_t kExtentsMax = 1u << 28;  // 1 PiB of chunks
constexpr uint32_t kPiecesMax = 1u << 28;
constexpr uint32_t kWorldMax = 100'000;  // five digits of a rank in a manifest's name
constexpr uint32_t kQueueDepthMax = 64;
constexpr uint32_t kPwriteThreadsMax = 16;
constexpr uint32_t kRankDigits = 5;
constexpr uint32_t kDigestDigits = 32;
constexpr uint32_t kTemporarySuffixBytes = 4;  // ".tmp"
constexpr uint64_t kRangeAlignment = 64;

/// Returns the length of a zero-terminated string in a field of `capacity` bytes, or `capacity`
/// without a terminator.
size_t LengthOf(const char* text, size_t capacity) {
  size_t length = 0;
  while (length < capacity && text[length] != '\0') ++length;
  return length;
}

/// Checks a name of one path component, with `room` bytes left for a suffix.
bool IsComponent(const char* name, size_t capacity, size_t room) {
  const size_t length = LengthOf(name, capacity);
  if (length == 0 || length + room >= capacity) return false;
  for (size_t i = 0; i < length; ++i) {
    if (name[i] == '/') return false;
  }
  return !(name[0] == '.' && (length == 1 || (length == 2 && name[1] == '.')));
}

bool IsDot(const char* name) { return name[0] == '.' && name[1] == '\0'; }

bool SameName(const char* a, const char* b) {
  size_t i = 0;
  while (a[i] != '\0' && a[i] == b[i]) ++i;
  return a[i] == b[i];
}

/// Checks a manifest slot for the digits of a digest; 0 is none.
bool DigestSlotFits(uint64_t slot, uint64_t manifest_bytes) {
  return slot == 0 || (slot <= manifest_bytes && manifest_bytes - slot >= kDigestDigits);
}

bool SlotFits(const Slot& slot, uint64_t manifest_bytes) {
  return slot.width == 0 ||
         (slot.offset <= manifest_bytes && manifest_bytes - slot.offset >= slot.width);
}

/// Ranges of the table's arrays.
const char* CheckRanges(const Job& job) {
  const struct {
    Range range;
    uint64_t count;
    uint64_t bytes_each;
  } arrays[] = {
      {job.files, job.file_count, sizeof(File)},
      {job.extents, job.extent_count, sizeof(Extent)},
      {job.pieces, job.piece_count, sizeof(Piece)},
      {job.published, job.extent_count, sizeof(SharedU32)},
      {job.acknowledged, job.extent_count, sizeof(SharedU32)},
      {job.manifest_template, job.manifest_template.bytes, 1},
      {job.older, job.older.bytes / sizeof(AttemptId), sizeof(AttemptId)},
      {job.trash, job.trash.bytes / kNameBytes, kNameBytes},
      {job.commit_template, job.commit_template.bytes, 1},
  };
  for (const auto& array : arrays) {
    // Of an empty range, too: views of it are computed.
    if (array.range.offset > job.table_bytes) return "a range starts behind the table";
    if (array.range.bytes == 0 && array.count == 0) continue;
    if (array.range.offset % kRangeAlignment != 0) return "a range is not aligned to 64 bytes";
    if (array.range.offset < sizeof(Job)) return "a range overlaps the head";
    if (array.range.bytes > job.table_bytes - array.range.offset) {
      return "a range ends behind the table";
    }
    if (array.range.bytes != array.count * array.bytes_each) return "a range has the wrong size";
  }
  for (const auto& a : arrays) {
    for (const auto& b : arrays) {
      if (&a == &b || a.range.bytes == 0 || b.range.bytes == 0) continue;
      if (a.range.offset < b.range.offset + b.range.bytes &&
          b.range.offset < a.range.offset + a.range.bytes) {
        return "two ranges overlap";
      }
    }
  }
  return nullptr;
}

const char* CheckNames(const Job& job) {
  const bool files_only = (job.flags & kFilesOnly) != 0;
  if (!(files_only && IsDot(job.target)) && !IsComponent(job.target, sizeof(job.target), 0)) {
    return "the target is not a name";
  }
  if (!files_only) {
    if (!IsComponent(job.partial, sizeof(job.partial), 0)) return "the partial name is not a name";
    if (SameName(job.partial, job.target)) return "the partial name is the target";
  }
  if ((job.flags & kSingleFile) != 0) {
    if (!files_only || (job.flags & kWriteManifest) == 0 || job.world_size != 1 ||
        job.file_count != 1)
      return "a single file that is not alone";
    if (!IsComponent(job.partial, sizeof(job.partial), 0)) return "the partial name is not a name";
  }
  if ((job.flags & kWriteManifest) == 0) {
    // A directory without manifests is no checkpoint, and ranks would have no vote to wait for.
    return job.world_size > 1 && !files_only ? "ranks without a manifest" : nullptr;
  }
  if (!IsComponent(job.manifest, sizeof(job.manifest), kTemporarySuffixBytes))
    return "the manifest is not a name";
  const size_t prefix = LengthOf(job.manifest_prefix, sizeof(job.manifest_prefix));
  const size_t suffix = LengthOf(job.manifest_suffix, sizeof(job.manifest_suffix));
  if (prefix == sizeof(job.manifest_prefix) || suffix == sizeof(job.manifest_suffix)) {
    return "the manifest's prefix or suffix is not terminated";
  }
  if (job.world_size > 1 && !files_only) {
    char name[kNameBytes] = {};
    for (size_t i = 0; i < prefix; ++i) name[i] = job.manifest_prefix[i];
    uint32_t rank = job.rank;
    for (uint32_t digit = kRankDigits; digit-- > 0; rank /= 10) {
      name[prefix + digit] = static_cast<char>('0' + rank % 10);
    }
    for (size_t i = 0; i < suffix; ++i) name[prefix + kRankDigits + i] = job.manifest_suffix[i];
    if (!SameName(name, job.manifest)) return "the manifest's name is not that of its rank";
  }
  return nullptr;
}

const char* CheckManifest(const Job& job) {
  if ((job.flags & kWriteManifest) == 0) return nullptr;
  const uint64_t bytes = job.manifest_template.bytes;
  const ManifestSlots& slots = job.slots;
  for (const Slot& slot : {slots.engine, slots.engine_reason, slots.direct_io, slots.streamed,
                           slots.bytes_written, slots.time_writing_ns, slots.time_syncing_ns,
                           slots.time_total_ns, slots.replicas, slots.self_digest}) {
    if (!SlotFits(slot, bytes)) return "a slot lies outside of the manifest";
  }
  if (slots.replicas.width != 0 && slots.replicas.width != kDigestDigits) {
    return "the slot for the digest of the replicas has not 32 digits";
  }
  if (slots.self_digest.width != 0 && slots.self_digest.width != kDigestDigits) {
    return "the self-digest's slot has not 32 digits";
  }
  return nullptr;
}

const char* CheckCommitRecord(const Job& job) {
  const uint64_t bytes = job.commit_template.bytes;
  if (bytes == 0) return nullptr;
  if (job.rank != 0 || (job.flags & kFilesOnly) != 0 || (job.flags & kWriteManifest) == 0) {
    return "a commit record that is not this job's to write";
  }
  const CommitSlots& slots = job.commit_slots;
  for (const Slot& slot :
       {slots.committed_at_ns, slots.bytes, slots.manifest_bytes, slots.self_digest}) {
    if (!SlotFits(slot, bytes)) return "a slot lies outside of the commit record";
  }
  if (slots.self_digest.width != kDigestDigits) return "the commit record has no self-digest";
  // The last row; earlier rows precede it.
  const uint64_t rows = job.world_size - 1;
  if (slots.row_bytes == 0 || slots.row_bytes > bytes / job.world_size) {
    return "the rows of the commit record have the wrong length";
  }
  const Slot last = {slots.manifest_bytes.offset + rows * slots.row_bytes,
                     slots.manifest_bytes.width};
  if (!SlotFits(last, bytes) || slots.manifest_digest > bytes ||
      !DigestSlotFits(slots.manifest_digest + rows * slots.row_bytes, bytes)) {
    return "a row lies outside of the commit record";
  }
  return nullptr;
}

const char* CheckExtents(const Job& job) {
  Job* const table = const_cast<Job*>(&job);
  const File* const files = Files(table);
  const Extent* const extents = Extents(table);
  const Piece* const pieces = Pieces(table);
  const uint64_t manifest_bytes = job.manifest_template.bytes;
  uint64_t extent_next = 0;
  for (uint32_t i = 0; i < job.file_count; ++i) {
    const File& file = files[i];
    if (!IsComponent(file.name, sizeof(file.name), kTemporarySuffixBytes))
      return "a file's name is not a name";
    if (file.bytes > uint64_t{kExtentsMax} * kChunkBytes) return "a file is too long";
    if (file.extent_first != extent_next) return "a file's extents do not follow the last one's";
    if (file.extent_count != (file.bytes + kChunkBytes - 1) / kChunkBytes) {
      return "a file's extents are not its chunks";
    }
    if (!DigestSlotFits(file.root_slot, manifest_bytes)) return "a root's slot is outside";
    if (file.replicated != 0 && (job.slots.replicas.width == 0 || (job.flags & kFilesOnly) != 0)) {
      return "a replicated file that rank 0 cannot compare";
    }
    extent_next += file.extent_count;
    if (extent_next > job.extent_count) return "a file has more extents than there are";
    for (uint32_t k = 0; k < file.extent_count; ++k) {
      const Extent& extent = extents[file.extent_first + k];
      const uint64_t offset = uint64_t{k} * kChunkBytes;
      const uint64_t left = file.bytes - offset;
      if (extent.file != i || extent.file_offset != offset) return "an extent is misplaced";
      if (extent.bytes != (left < kChunkBytes ? left : kChunkBytes)) {
        return "an extent has the wrong length";
      }
      if (!DigestSlotFits(extent.digest_slot, manifest_bytes)) return "a chunk's slot is outside";
      if (extent.piece_first > job.piece_count ||
          extent.piece_count > job.piece_count - extent.piece_first) {
        return "an extent's pieces are outside";
      }
      uint64_t covered = 0;
      for (uint32_t p = 0; p < extent.piece_count; ++p) {
        const Piece& piece = pieces[extent.piece_first + p];
        if (piece.offset < covered || piece.offset > extent.bytes ||
            piece.bytes > extent.bytes - piece.offset) {
          return "a piece is outside of its extent or overlaps another";
        }
        if (piece.tensor != Failure::kNoIndex && piece.tensor >= job.tensor_count) {
          return "a piece names no tensor";
        }
        covered = uint64_t{piece.offset} + piece.bytes;
      }
    }
  }
  return extent_next == job.extent_count ? nullptr : "an extent belongs to no file";
}

const char* CheckTrash(const Job& job) {
  const char* const names = At<char>(const_cast<Job*>(&job), job.trash);
  for (uint64_t at = 0; at < job.trash.bytes; at += kNameBytes) {
    const size_t length = LengthOf(names + at, kNameBytes);
    if (length >= kNameBytes) return "a name to delete is not terminated";
    // No ".tmp" is appended: any directory name fits.
    for (size_t i = 0; i < length; ++i) {
      if (names[at + i] == '/') return "a name to delete has a slash";
    }
    if (length == 0 || IsDot(names + at) || SameName(names + at, "..")) {
      return "a name to delete is not a name";
    }
  }
  return nullptr;
}

}  // namespace

const char* ValidateJob(const Job* job, uint64_t mapped_bytes) {
  if (mapped_bytes < sizeof(Job)) return "the table is shorter than its head";
  if (job->magic != kJobMagic) return "this is not a job table";
  if (job->layout_version != kLayoutVersion) return "the table has another layout version";
  if (job->table_bytes < sizeof(Job) || job->table_bytes > mapped_bytes) {
    return "the table is longer than its mapping";
  }
  if (job->kind != JobKind::kSave && job->kind != JobKind::kDelete) return "unknown kind of job";
  if (!IsLauncher(job->launcher)) return "unknown launcher";
  if (job->engine > EngineRung::kPwrite) return "unknown engine";
  if (job->qos.cpu_count > sizeof(job->qos.cpus) / sizeof(job->qos.cpus[0])) {
    return "more CPUs than the table holds";
  }
  if (job->trash.bytes % kNameBytes != 0) return "the names to delete have the wrong size";
  if (job->file_count > kFilesMax) return "too many files";
  if (job->extent_count > kExtentsMax) return "too many extents";
  if (job->piece_count > kPiecesMax) return "too many pieces";
  if (const char* wrong = CheckRanges(*job)) return wrong;
  if (job->kind == JobKind::kDelete) return CheckTrash(*job);

  if (job->queue_depth < 1 || job->queue_depth > kQueueDepthMax) return "queue depth not 1 to 64";
  if (job->pwrite_threads > kPwriteThreadsMax) return "more than 16 pwrite threads";
  if (job->world_size < 1 || job->world_size > kWorldMax) return "world size not 1 to 100000";
  if (job->rank >= job->world_size) return "the rank is outside of the world";
  if (const char* wrong = CheckNames(*job)) return wrong;
  if (const char* wrong = CheckManifest(*job)) return wrong;
  if (const char* wrong = CheckCommitRecord(*job)) return wrong;
  return CheckExtents(*job);
}

}  // namespace holdfast::layout
