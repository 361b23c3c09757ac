#include "runtime/worker/proof.h"

#include "runtime/digest/digest.h"
#include "runtime/sys/assert.h"

namespace holdfast::worker {
namespace {

/// Returns the failure for a chunk that differs from its seal.
Failure Blame(const JobRun& run, const layout::Extent& extent, const char* bytes,
              const Digest& found) {
  Failure failure;
  failure.code = FailureCode::kDataLoss;
  failure.operation = Operation::kDigest;
  failure.file = extent.file;
  failure.offset = extent.file_offset;
  failure.bytes = extent.bytes;
  failure.expected = extent.sealed;
  failure.found = found;

  const layout::Piece* const pieces = layout::Pieces(run.job) + extent.piece_first;
  HOLDFAST_ASSERT(uint64_t{extent.piece_first} + extent.piece_count <= run.job->piece_count);
  const layout::Piece* undigested = nullptr;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    const layout::Piece& piece = pieces[i];
    HOLDFAST_ASSERT(piece.offset <= extent.bytes && piece.bytes <= extent.bytes - piece.offset);
    if (piece.has_digest == 0) {
      if (undigested == nullptr) undigested = &piece;
      continue;
    }
    const Digest now = digest::Of(bytes + piece.offset, piece.bytes);
    if (now == piece.digest) continue;
    failure.tensor = piece.tensor;
    failure.offset = extent.file_offset + piece.offset;
    failure.bytes = piece.bytes;
    failure.expected = piece.digest;
    failure.found = now;
    return failure;
  }
  // Every digest of a part agrees. The difference is therefore in a part without a digest: a tensor
  // that owns the chunk alone, the file's header, or the gaps between.
  if (undigested != nullptr) {
    failure.tensor = undigested->tensor;
    failure.offset = extent.file_offset + undigested->offset;
    failure.bytes = undigested->bytes;
  }
  return failure;
}

}  // namespace

bool ProveExtent(JobRun* run, uint32_t index, const char* bytes) {
  HOLDFAST_ASSERT(index < run->job->extent_count);
  HOLDFAST_ASSERT(bytes != nullptr);
  const layout::Extent& extent = layout::Extents(run->job)[index];
  const Digest found = digest::Of(bytes, extent.bytes);
  if (found == extent.sealed) return true;
  return Fail(run, Blame(*run, extent, bytes, found));
}

}  // namespace holdfast::worker
