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

/// Cuts the wanted bytes of a tensor at chunk borders and finds the digest of each piece. A digest
/// proves the whole part of a tensor in its chunk, so verification reads the whole part.
void AppendPieces(const PlannedTensor& tensor, const WantedTensor& wanted,
                  const format::Manifest* manifest, std::vector<TensorPiece>* pieces) {
  const uint64_t wanted_begin = tensor.begin + wanted.begin;
  const uint64_t wanted_end = wanted_begin + wanted.bytes;
  for (uint64_t at = wanted_begin; at < wanted_end;) {
    const uint64_t chunk_begin = at / kChunkBytes * kChunkBytes;
    const uint64_t part_begin = std::max(chunk_begin, tensor.begin);
    const uint64_t part_end = std::min<uint64_t>(chunk_begin + kChunkBytes, tensor.end);
    const uint64_t end = std::min(part_end, wanted_end);
    const uint64_t read_begin = manifest != nullptr ? part_begin : at;
    const uint64_t read_end = manifest != nullptr ? part_end : end;
    TensorPiece piece{.tensor = wanted.tensor,
                      .target = wanted.target,
                      .file = tensor.file,
                      .bytes = static_cast<uint32_t>(read_end - read_begin),
                      .begin = read_begin,
                      .copy_from = static_cast<uint32_t>(at - read_begin),
                      .copy_bytes = static_cast<uint32_t>(end - at),
                      .target_offset = at - wanted_begin};
    if (manifest != nullptr) piece.digest = DigestOf(*manifest, piece);
    pieces->push_back(piece);
    at = end;
  }
}

/// `end`: of the bytes read so far.
bool Joins(uint64_t end, const TensorPiece& last, const TensorPiece& next) {
  return last.file == next.file && last.begin / kChunkBytes == next.begin / kChunkBytes &&
         next.begin <= end + kGapBytesMax;
}

TensorRead ReadOf(const TensorPiece& head, uint32_t first, uint32_t count, uint64_t end,
                  uint64_t index) {
  return {.range = {.file = head.file,
                    .bytes = static_cast<uint32_t>(end - head.begin),
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
    // Parts of one tensor may overlap: the last piece need not have the largest end.
    uint64_t end = plan.pieces[first].begin + plan.pieces[first].bytes;
    while (first + count < plan.pieces.size() &&
           Joins(end, plan.pieces[first], plan.pieces[first + count])) {
      const TensorPiece& next = plan.pieces[first + count];
      end = std::max(end, next.begin + next.bytes);
      ++count;
    }
    plan.reads.push_back(ReadOf(plan.pieces[first], first, count, end, plan.reads.size()));
    plan.ranges.push_back(plan.reads.back().range);
    first += count;
  }
  return plan;
}

}  // namespace holdfast::load
