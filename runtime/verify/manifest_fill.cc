#include "runtime/verify/manifest_fill.h"

#include <algorithm>

#include "runtime/digest/digest.h"
#include "runtime/format/tensor_parts.h"
#include "runtime/layout/manifest_slots.h"

namespace holdfast::verify {

ManifestFill::ManifestFill(const format::ManifestInput& input, const SavePlan& plan)
    : input_(input),
      plan_(plan),
      template_(format::BuildManifest(input, plan)),
      chunks_(plan.files.size()),
      tensors_(plan.files.size()) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    chunks_[i].resize(format::ChunkCount(plan.files[i].bytes));
  }
  for (uint32_t i = 0; i < plan.tensors.size(); ++i) {
    const PlannedTensor& tensor = plan.tensors[i];
    if (tensor.begin != tensor.end) tensors_[tensor.file].push_back(i);
  }
  for (std::vector<uint32_t>& of_file : tensors_) {
    std::sort(of_file.begin(), of_file.end(), [&plan](uint32_t a, uint32_t b) {
      return plan.tensors[a].begin < plan.tensors[b].begin;
    });
  }
}

void ManifestFill::AddChunk(uint32_t file, uint64_t chunk, const char* data, uint64_t bytes) {
  const uint64_t begin = chunk * kChunkBytes;
  const uint64_t end = begin + bytes;
  std::vector<digest::Part> parts;
  std::vector<uint64_t> places;
  const std::vector<uint32_t>& tensors = tensors_[file];
  auto at = std::partition_point(tensors.begin(), tensors.end(),
                                 [&](uint32_t index) { return plan_.tensors[index].end <= begin; });
  for (; at != tensors.end() && plan_.tensors[*at].begin < end; ++at) {
    const PlannedTensor& tensor = plan_.tensors[*at];
    const format::TensorParts of =
        format::PartsOf(tensor.begin, tensor.end, plan_.files[file].bytes);
    const uint64_t from = std::max(tensor.begin, begin);
    const uint64_t to = std::min(tensor.end, end);
    const bool head = of.has_head && from == tensor.begin;
    const bool tail = of.has_tail && from == of.tail_begin;
    if (!head && !tail) continue;
    parts.push_back({static_cast<uint32_t>(from - begin), static_cast<uint32_t>(to - from)});
    places.push_back(head ? template_.tensors[*at].head : template_.tensors[*at].tail);
  }
  std::vector<Digest> digests(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) parts[i].out = &digests[i];
  chunks_[file][chunk] = digest::OfChunk(data, bytes, parts.data(), parts.size());
  PutDigest(template_.chunk_digests[file][chunk], chunks_[file][chunk]);
  for (size_t i = 0; i < parts.size(); ++i) PutDigest(places[i], digests[i]);
}

std::string ManifestFill::Finish(EngineRung engine, const char* reason, DirectIo direct_io) {
  for (uint32_t i = 0; i < plan_.files.size(); ++i) {
    digest::RootStream root({.attempt = input_.attempt,
                             .rank = input_.rank,
                             .world_size = input_.world_size,
                             .file = i,
                             .file_bytes = plan_.files[i].bytes});
    for (const Digest& chunk : chunks_[i]) root.Add(chunk);
    PutDigest(template_.file_roots[i], root.Finish());
  }
  char* text = template_.text.data();
  const layout::ManifestSlots& slots = template_.slots;
  layout::FillText(text, slots.engine, layout::ManifestWord(engine));
  layout::FillText(text, slots.engine_reason, reason);
  layout::FillText(text, slots.direct_io, layout::ManifestWord(direct_io));
  layout::FillBool(text, slots.streamed, false);
  layout::FillNumber(text, slots.bytes_written, 0);
  layout::FillNumber(text, slots.time_writing_ns, 0);
  layout::FillNumber(text, slots.time_syncing_ns, 0);
  layout::FillNumber(text, slots.time_total_ns, 0);
  PutDigest(slots.self_digest.offset, digest::Of(text, slots.self_digest.offset));
  return template_.text;
}

void ManifestFill::PutDigest(uint64_t place, const Digest& digest) {
  digest::ToHex(digest, template_.text.data() + place);
}

}  // namespace holdfast::verify
