#include "runtime/load/tensor_reads.h"

#include <algorithm>
#include <tuple>

#include "runtime/format/tensor_parts.h"

namespace holdfast::load {
namespace {

Digest DigestOf(const format::Manifest& manifest, const TensorPiece& piece) {
  const format::Manifest::Tensor& tensor = manifest.tensors[piece.tensor];
  const format::Manifest::File& file = manifest.files[piece.file];
  const format::TensorParts parts = format::PartsOf(tensor.begin, tensor.end, file.bytes);
  if (parts.has_head && piece.begin == tensor.begin) return tensor.head;
  if (parts.has_tail && piece.begin == parts.tail_begin) return tensor.tail;
  return file.chunks[piece.begin / kChunkBytes];
}

/// Cuts a tensor at chunk borders and finds the digest of each piece.
void AppendPieces(const PlannedTensor& tensor, const WantedTensor& wanted,
                  const format::Manifest* manifest, std::vector<TensorPiece>* pieces) {
  for (uint64_t begin = tensor.begin; begin < tensor.end;) {
    const uint64_t border = (begin / kChunkBytes + 1) * kChunkBytes;
    const uint64_t end = std::min(border, tensor.end);
    TensorPiece piece{.tensor = wanted.tensor,
                      .target = wanted.target,
                      .file = tensor.file,
                      .bytes = static_cast<uint32_t>(end - begin),
                      .begin = begin,
                      .target_offset = begin - tensor.begin};
    if (manifest != nullptr) piece.digest = DigestOf(*manifest, piece);
    pieces->push_back(piece);
    begin = end;
  }
}

bool Joins(const TensorPiece& last, const TensorPiece& next) {
  return last.file == next.file && last.begin / kChunkBytes == next.begin / kChunkBytes &&
         next.begin - (last.begin + last.bytes) <= kGapBytesMax;
}

TensorRead ReadOf(const std::vector<TensorPiece>& pieces, uint32_t first, uint32_t count,
                  uint64_t index) {
  const TensorPiece& head = pieces[first];
  const TensorPiece& tail = pieces[first + count - 1];
  return {.range = {.file = head.file,
                    .bytes = static_cast<uint32_t>(tail.begin + tail.bytes - head.begin),
                    .offset = head.begin,
                    .tag = index},
          .piece_first = first,
          .piece_count = count};
}

}  // namespace

ReadPlan PlanReads(absl::Span<const PlannedTensor> tensors, absl::Span<const WantedTensor> wanted,
                   const format::Manifest* manifest) {
  ReadPlan plan;
  for (const WantedTensor& want : wanted) {
    AppendPieces(tensors[want.tensor], want, manifest, &plan.pieces);
  }
  std::sort(plan.pieces.begin(), plan.pieces.end(), [](const TensorPiece& a, const TensorPiece& b) {
    return std::tie(a.file, a.begin) < std::tie(b.file, b.begin);
  });
  for (uint32_t first = 0; first < plan.pieces.size();) {
    uint32_t count = 1;
    while (first + count < plan.pieces.size() &&
           Joins(plan.pieces[first + count - 1], plan.pieces[first + count])) {
      ++count;
    }
    plan.reads.push_back(ReadOf(plan.pieces, first, count, plan.reads.size()));
    plan.ranges.push_back(plan.reads.back().range);
    first += count;
  }
  return plan;
}

}  // namespace holdfast::load
