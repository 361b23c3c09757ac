// ParseManifest. An input is tried as it is, and with its self-digest made right, or nothing behind
// that check would ever be reached.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "fuzz/expect.h"
#include "runtime/digest/digest.h"
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
  std::string whole = text.substr(0, text.rfind(",\n\"self_digest\"")) + ",\n\"self_digest\":\"";
  char hex[32];
  holdfast::digest::ToHex(holdfast::digest::Of(whole.data(), whole.size()), hex);
  Check(whole + std::string(hex, sizeof(hex)) + "\"}\n");
  return 0;
}
