#include "runtime/format/file_names.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "holdfast/pod.h"
#include "runtime/format/manifest.h"
#include "runtime/format/text.h"

namespace holdfast::format {
namespace {

constexpr size_t kNewNameBytesMax = kNameBytes - sizeof(".tmp");

}  // namespace

const char* WrongComponent(absl::string_view name) {
  if (name.empty()) return "the name is empty";
  if (name == "." || name == "..") return "the name is a directory's";
  if (absl::StrContains(name, '/')) return "the name has a '/'";
  if (absl::StrContains(name, '\0')) return "the name has a zero byte";
  if (name.size() > kNameBytes - 1) return "the name has more than 255 bytes";
  if (!IsUtf8(name)) return "the name is not UTF-8";
  return nullptr;
}

const char* WrongDataFileName(absl::string_view name) {
  const char* const wrong = WrongComponent(name);
  if (wrong != nullptr) return wrong;
  if (absl::StartsWith(name, "rank-") && absl::EndsWith(name, ".manifest.json")) {
    return "the name is a rank manifest's";
  }
  if (absl::EndsWith(name, ".tmp")) return "the name ends in \".tmp\"";
  return nullptr;
}

const char* WrongNewFileName(absl::string_view name) {
  static_assert(kNewNameBytesMax == 251);
  if (name.size() > kNewNameBytesMax && name.size() < kNameBytes)
    return "the name has more than 251 bytes, and the file is written as NAME.tmp first";
  return WrongDataFileName(name);
}

std::string ManifestPrefix() { return "rank-"; }

std::string ManifestSuffix(uint32_t world_size) {
  return absl::StrFormat("-of-%05d.manifest.json", world_size);
}

std::string ManifestName(uint32_t rank, uint32_t world_size) {
  return absl::StrFormat("rank-%05d-of-%05d.manifest.json", rank, world_size);
}

std::string ManifestName(uint32_t rank, uint32_t world_size, const AttemptId& attempt) {
  return absl::StrFormat("rank-%05d-of-%05d-%016x%016x.manifest.json", rank, world_size,
                         attempt.high, attempt.low);
}

std::string ModelFileName(uint32_t rank, uint32_t world_size) {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", rank, world_size);
}

}  // namespace holdfast::format
