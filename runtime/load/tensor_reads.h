// The reads for a set of tensors, and the digest that proves each: pure arithmetic.
//
// A manifest has a digest for every part of a tensor in one chunk: the chunk's own where the tensor
// fills the chunk, otherwise the tensor's head or tail. So a small tensor is proven without reading
// the chunk around it.
#ifndef HOLDFAST_RUNTIME_LOAD_TENSOR_READS_H_
#define HOLDFAST_RUNTIME_LOAD_TENSOR_READS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "runtime/format/manifest.h"
#include "runtime/load/chunk_stream.h"

namespace holdfast::load {

/// The part of a wanted tensor in one chunk, and the wanted bytes of that part.
struct TensorPiece {
  uint32_t tensor = 0;  ///< Index into the reader's tensors.
  uint32_t target = 0;  ///< Index into the caller's targets.
  uint32_t file = 0;
  uint32_t bytes = 0;       ///< Bytes to read. With a manifest, all bytes that the digest covers.
  uint64_t begin = 0;       ///< In the file.
  Digest digest;            ///< Of exactly the bytes read; only with a manifest.
  uint32_t copy_from = 0;   ///< First wanted byte, from `begin` ...
  uint32_t copy_bytes = 0;  ///< ... and the number of wanted bytes.
  uint64_t target_offset = 0;  ///< Where the wanted bytes go in the target.
};

/// One read: adjacent pieces of one chunk with small gaps.
struct TensorRead {
  StreamRange range;  ///< The tag is the read's own index.
  uint32_t piece_first = 0;
  uint32_t piece_count = 0;
};

struct ReadPlan {
  std::vector<TensorPiece> pieces;  ///< By file and offset.
  std::vector<TensorRead> reads;
  std::vector<StreamRange> ranges;  ///< Of the reads.
};

/// A wanted range of a tensor.
struct WantedTensor {
  uint32_t tensor = 0;
  uint32_t target = 0;
  uint64_t begin = 0;  ///< In the tensor.
  uint64_t bytes = 0;
};

/// Reading through a gap up to this long costs less than another request.
inline constexpr uint64_t kGapBytesMax = 64 * 1024;

/// Plans the reads. `manifest` null: no verification. `tensors` are the manifest's, or a plain
/// file's.
ReadPlan PlanReads(absl::Span<const PlannedTensor> tensors, absl::Span<const WantedTensor> wanted,
                   const format::Manifest* manifest);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_TENSOR_READS_H_
