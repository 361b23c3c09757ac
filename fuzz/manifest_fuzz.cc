// ParseManifest. An input is tried as it is, and with a right self-digest.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "fuzz/expect.h"
#include "fuzz/self_digest.h"
#include "runtime/format/manifest.h"

namespace {

void Check(const std::string& text) {
  const auto manifest = holdfast::format::ParseManifest(text);
  if (!manifest.ok()) {
    HOLDFAST_EXPECT(manifest.status().code() == absl::StatusCode::kDataLoss);
    return;
  }
  HOLDFAST_EXPECT(nlohmann::json::accept(text));
  HOLDFAST_EXPECT(manifest->rank < manifest->world_size);
  for (const auto& file : manifest->files) {
    HOLDFAST_EXPECT(!file.name.empty() && file.name.find('/') == std::string::npos);
    HOLDFAST_EXPECT(file.name != "." && file.name != "..");
    HOLDFAST_EXPECT(file.chunks.size() * holdfast::kChunkBytes >= file.bytes);
  }
  for (const auto& tensor : manifest->tensors) {
    HOLDFAST_EXPECT(tensor.file < manifest->files.size());
    HOLDFAST_EXPECT(tensor.begin <= tensor.end);
    HOLDFAST_EXPECT(tensor.end <= manifest->files[tensor.file].bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  Check(text);
  Check(holdfast::fuzz::WithSelfDigest(text));
  return 0;
}
