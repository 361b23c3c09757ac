#include "tests/testing/checkpoint_files.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/digest/digest.h"
#include "runtime/format/safetensors.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/verify/manifest_fill.h"

namespace holdfast::testing {
namespace {

std::string ContentOf(const PlannedFile& file) {
  std::string content;
  for (const Segment& segment : file.segments) {
    if (segment.tensor == Segment::kLiteral) {
      content += segment.literal;
    } else {
      content.append(static_cast<const char*>(segment.data), segment.bytes);
    }
  }
  return content;
}

std::string Hex(const AttemptId& attempt) {
  std::string text(32, '0');
  digest::ToHex(attempt, text.data());
  return text;
}

}  // namespace

std::string RankFiles::model_name() const { return format::ModelFileName(rank, world_size); }
std::string RankFiles::manifest_name() const { return format::ManifestName(rank, world_size); }

SavePlan WriteRank(const std::string& directory, const RankFiles& rank,
                   absl::Span<const TensorSource> tensors) {
  SafetensorsOptions options;
  options.metadata.emplace_back(format::kAttemptKey, Hex(rank.attempt));
  auto plan = PlanSafetensors(rank.model_name(), tensors, options);
  if (!plan.ok()) abort();
  const std::string content = ContentOf(plan->files[0]);
  WriteFileBytes(absl::StrCat(directory, "/", rank.model_name()), content);
  WriteFileBytes(absl::StrCat(directory, "/", rank.manifest_name()),
                 ManifestText(rank, *plan, {content}));
  return *std::move(plan);
}

std::string ManifestText(const RankFiles& rank, const SavePlan& plan,
                         const std::vector<std::string>& contents) {
  verify::ManifestFill fill({.checkpoint = rank.checkpoint,
                             .attempt = rank.attempt,
                             .rank = rank.rank,
                             .world_size = rank.world_size,
                             .step = rank.step},
                            plan);
  for (uint32_t file = 0; file < contents.size(); ++file) {
    std::vector<load::StreamRange> chunks;
    load::AppendRanges(file, 0, contents[file].size(), 0, &chunks);
    for (const load::StreamRange& chunk : chunks) {
      fill.AddChunk(file, chunk.offset / kChunkBytes, contents[file].data() + chunk.offset,
                    chunk.bytes);
    }
  }
  return fill.Finish(EngineRung::kPwrite, "test", DirectIo::kNo);
}

std::string Resealed(std::string manifest) {
  // The 32 digits precede the last three bytes: a quote, a brace, a line feed.
  const size_t place = manifest.size() - 35;
  digest::ToHex(digest::Of(manifest.data(), place), manifest.data() + place);
  return manifest;
}

const PlannedTensor& TensorOf(const SavePlan& plan, const std::string& name) {
  for (const PlannedTensor& tensor : plan.tensors) {
    if (tensor.name == name) return tensor;
  }
  abort();
}

std::string ReadFileBytes(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(bytes).str();
}

void WriteFileBytes(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) abort();
}

void FlipBit(const std::string& path, uint64_t offset) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(offset));
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(byte);
  if (!file.flush()) abort();
}

}  // namespace holdfast::testing
