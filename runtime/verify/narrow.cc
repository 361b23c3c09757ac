#include "runtime/verify/narrow.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/tensor_parts.h"

namespace holdfast::verify {
namespace {

using Tensor = format::Manifest::Tensor;

/// The part of a tensor in one chunk, and its digest; null where the tensor fills the chunk.
struct Part {
  uint64_t begin = 0;
  uint64_t end = 0;
  const Digest* digest = nullptr;
};

Part PartIn(const Tensor& tensor, uint64_t file_bytes, uint64_t chunk_begin, uint64_t chunk_end) {
  const format::TensorParts parts = format::PartsOf(tensor.begin, tensor.end, file_bytes);
  Part part{std::max(tensor.begin, chunk_begin), std::min(tensor.end, chunk_end), nullptr};
  if (parts.has_head && part.begin == tensor.begin) {
    part.digest = &tensor.head;
  } else if (parts.has_tail && part.begin == parts.tail_begin) {
    part.digest = &tensor.tail;
  }
  return part;
}

}  // namespace

FileMap::FileMap(const format::Manifest& manifest, uint32_t file)
    : manifest_(&manifest), file_(file) {
  for (const Tensor& tensor : manifest.tensors) {
    if (tensor.file == file && tensor.begin != tensor.end) tensors_.push_back(&tensor);
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const Tensor* a, const Tensor* b) { return a->begin < b->begin; });
}

std::vector<const Tensor*> FileMap::Overlapping(uint64_t begin, uint64_t end) const {
  // Tensors do not overlap, so their ends are in order too.
  auto at = std::partition_point(tensors_.begin(), tensors_.end(),
                                 [begin](const Tensor* tensor) { return tensor->end <= begin; });
  std::vector<const Tensor*> found;
  for (; at != tensors_.end() && (*at)->begin < end; ++at) found.push_back(*at);
  return found;
}

std::vector<Fault> Narrow(const FileMap& map, uint64_t chunk, const char* data, uint64_t bytes,
                          const Digest& found) {
  const format::Manifest::File& file = map.file();
  const uint64_t begin = chunk * kChunkBytes;
  const uint64_t end = begin + bytes;
  std::vector<Fault> faults;
  // The bytes of the chunk outside all tensors: from the first to the last such byte.
  uint64_t rest_begin = end;
  uint64_t rest_end = begin;
  uint64_t covered = begin;
  const auto add_rest = [&](uint64_t from, uint64_t to) {
    if (from >= to) return;
    rest_begin = std::min(rest_begin, from);
    rest_end = std::max(rest_end, to);
  };
  for (const Tensor* tensor : map.Overlapping(begin, end)) {
    const Part part = PartIn(*tensor, file.bytes, begin, end);
    add_rest(covered, part.begin);
    covered = part.end;
    const Digest seen = part.digest == nullptr
                            ? found
                            : digest::Of(data + (part.begin - begin), part.end - part.begin);
    const Digest& recorded = part.digest == nullptr ? file.chunks[chunk] : *part.digest;
    if (seen == recorded) continue;
    faults.push_back({.file = file.name,
                      .tensor = tensor->name,
                      .begin = part.begin,
                      .end = part.end,
                      .reason = "digest",
                      .expected = base::Hex(recorded),
                      .found = base::Hex(seen)});
  }
  add_rest(covered, end);
  if (!faults.empty()) return faults;
  // All tensors are right: the damage is in the header, or in framing between tensors.
  if (rest_begin >= rest_end) {
    rest_begin = begin;
    rest_end = end;
  }
  const std::string of_chunk = absl::StrCat(" (of bytes [", begin, ", ", end, "))");
  faults.push_back({.file = file.name,
                    .begin = rest_begin,
                    .end = rest_end,
                    .reason = "digest",
                    .expected = base::Hex(file.chunks[chunk]) + of_chunk,
                    .found = base::Hex(found) + of_chunk});
  return faults;
}

}  // namespace holdfast::verify
