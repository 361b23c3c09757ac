// The parts of a tensor that need their own digest, because chunk digests do not cover exactly
// them.
#ifndef HOLDFAST_RUNTIME_FORMAT_TENSOR_PARTS_H_
#define HOLDFAST_RUNTIME_FORMAT_TENSOR_PARTS_H_

#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::format {

/// Number of chunks of a file.
constexpr uint64_t ChunkCount(uint64_t file_bytes) {
  return file_bytes / kChunkBytes + (file_bytes % kChunkBytes != 0 ? 1 : 0);
}

/// `head` is the bytes from the tensor's begin up to the first chunk border or the tensor's end.
/// `tail` is the bytes from the last chunk border to the tensor's end. A part that is a whole chunk
/// has no digest of its own. So a tensor within one chunk has a head or nothing, and the chunks
/// between head and tail are the tensor's own.
struct TensorParts {
  bool has_head = false;
  bool has_tail = false;
  uint64_t head_end = 0;    ///< The head is [begin, head_end).
  uint64_t tail_begin = 0;  ///< The tail is [tail_begin, end).
};

/// Parts of the tensor at bytes [begin, end) of a file; end <= file_bytes.
constexpr TensorParts PartsOf(uint64_t begin, uint64_t end, uint64_t file_bytes) {
  TensorParts parts;
  if (begin == end) return parts;
  const uint64_t first = begin / kChunkBytes;
  const uint64_t last = (end - 1) / kChunkBytes;
  const bool at_border = begin % kChunkBytes == 0;
  // The file's last chunk ends with the file: a tensor that begins the chunk and ends the file owns
  // it.
  const bool to_border = end % kChunkBytes == 0 || end == file_bytes;
  parts.head_end = first == last ? end : (first + 1) * kChunkBytes;
  parts.tail_begin = last * kChunkBytes;
  if (first == last) {
    parts.has_head = !(at_border && to_border);
  } else {
    parts.has_head = !at_border;
    parts.has_tail = !to_border;
  }
  return parts;
}

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_TENSOR_PARTS_H_
