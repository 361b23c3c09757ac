#include "runtime/load/tensor_reads.h"

#include <algorithm>
#include <tuple>

namespace holdfast::load {
namespace {

/// Cuts a tensor at chunk borders and finds the digest of each piece.
void AppendPieces(const PlannedTensor& tensor, const WantedTensor& wanted,
                  const format::Manifest* manifest, std::vector<TensorPiece>* pieces) {
  for (uint64_t begin = tensor.begin; begin < tensor.end;) {
    const uint64_t chunk = begin / kChunkBytes;
    const uint64_t end = std::min((chunk + 1) * kChunkBytes, tensor.end);
    TensorPiece piece{.tensor = wanted.tensor,
                      .target = wanted.target,
                      .file = tensor.file,
                      .bytes = static_cast<uint32_t>(end - begin),
                      .begin = begin,
                      .target_offset = begin - tensor.begin};
    if (manifest != nullptr) {
      const format::Manifest::File& file = manifest->files[tensor.file];
      const format::Manifest::Tensor& recorded = manifest->tensors[wanted.tensor];
      const bool owns_chunk = begin == chunk * kChunkBytes &&
                              (end == (chunk + 1) * kChunkBytes || end == file.bytes);
      piece.has_digest = true;
      if (owns_chunk) {
        piece.digest = file.chunks[chunk];
      } else if (begin == tensor.begin && recorded.has_head) {
        piece.digest = recorded.head;
      } else if (end == tensor.end && recorded.has_tail) {
        piece.digest = recorded.tail;
      } else {
        piece.has_digest = false;
      }
    }
    pieces->push_back(piece);
    begin = end;
  }
}

bool Joins(const TensorPiece& last, const TensorPiece& next) {
  return last.file == next.file && last.begin / kChunkBytes == next.begin / kChunkBytes &&
         next.begin - (last.begin + last.bytes) <= kGapBytesMax;
}

TensorRead ReadOf(const std::vector<TensorPiece>& pieces, uint32_t first, uint32_t count,
                  const format::Manifest* manifest) {
  const TensorPiece& head = pieces[first];
  const TensorPiece& tail = pieces[first + count - 1];
  uint64_t begin = head.begin;
  uint64_t end = tail.begin + tail.bytes;
  TensorRead read{.piece_first = first, .piece_count = count};
  for (uint32_t i = first; manifest != nullptr && i < first + count; ++i) {
    read.whole_chunk = read.whole_chunk || !pieces[i].has_digest;
  }
  if (read.whole_chunk) {
    const format::Manifest::File& file = manifest->files[head.file];
    const uint64_t chunk = head.begin / kChunkBytes;
    begin = chunk * kChunkBytes;
    end = std::min(begin + kChunkBytes, file.bytes);
    read.digest = file.chunks[chunk];
  }
  read.range = {
      .file = head.file, .bytes = static_cast<uint32_t>(end - begin), .offset = begin, .tag = 0};
  return read;
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
    plan.reads.push_back(ReadOf(plan.pieces, first, count, manifest));
    plan.reads.back().range.tag = plan.reads.size() - 1;
    plan.ranges.push_back(plan.reads.back().range);
    first += count;
  }
  return plan;
}

}  // namespace holdfast::load
