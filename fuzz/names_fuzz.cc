// Names in directories of checkpoints, which users' programs make as well: a name has one role,
// and parsed parts are formatted as the same name.
#include <climits>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"

namespace {

using namespace holdfast::format;  // NOLINT: a fuzzer of this namespace
using holdfast::fuzz::Input;

// Parts of names: byte kPart, then the number of one. A byte but kPart is itself.
constexpr uint8_t kPart = 1;
constexpr absl::string_view kParts[] = {
    "rank-",          "-of-",
    "00001",          "00008",
    ".manifest.json", "0123456789abcdef0123456789abcdef",
    "fedcba98",       "holdfast.commit",
    ".json",          ".tmp",
    ".holdfast-",     ".holdfast-drain-",
    ".lock",          ".partial-",
    ".fenced-",       ".retired-",
    "step-",          "model.safetensors",
};
constexpr size_t kBytesMax = 300;  // more than a file system takes

std::string Name(Input* input) {
  std::string name;
  while (!input->AtEnd() && name.size() < kBytesMax) {
    const uint8_t byte = input->Byte();
    if (byte == kPart) {
      absl::StrAppend(&name, kParts[input->Below(std::size(kParts))]);
    } else {
      name.push_back(static_cast<char>(byte));
    }
  }
  return name;
}

std::optional<ManifestIdentity> ManifestOf(const std::string& name) {
  // As if the name of an unfinished file counted.
  if (holdfast::fuzz::Planted() && absl::EndsWith(name, ".tmp")) {
    return ParseManifestName(name.substr(0, name.size() - 4));
  }
  return ParseManifestName(name);
}

void ReadAsDirectory(const std::string& name) {
  const DirectoryName parsed = ParseDirectoryName(name);
  HOLDFAST_EXPECT(IsUncommittedName(name) == (parsed.kind != DirectoryKind::kFinal));
  if (parsed.kind == DirectoryKind::kFinal) {
    HOLDFAST_EXPECT(parsed.checkpoint == name);
    return;
  }
  HOLDFAST_EXPECT(!parsed.checkpoint.empty() && parsed.checkpoint.size() < name.size());
  // Names of earlier versions, and those at the limit of the file system, lack the dot.
  const std::string formatted = FormatDirectoryName(parsed);
  HOLDFAST_EXPECT(formatted == name || formatted == "." + name || "." + formatted == name);
  const DirectoryName again = ParseDirectoryName(formatted);
  // A longer one has lost a first dot, for which there was no room, and may begin with another.
  HOLDFAST_EXPECT(name.size() > NAME_MAX ||
                  (again.checkpoint == parsed.checkpoint && again.kind == parsed.kind));
}

void ReadAsFile(const std::string& name) {
  int roles = 0;
  if (const auto manifest = ManifestOf(name); manifest.has_value()) {
    ++roles;
    HOLDFAST_EXPECT(manifest->rank < manifest->world_size);
    const std::string formatted =
        manifest->attempt.has_value()
            ? ManifestName(manifest->rank, manifest->world_size, *manifest->attempt)
            : ManifestName(manifest->rank, manifest->world_size);
    HOLDFAST_EXPECT(formatted == name);
    HOLDFAST_EXPECT(IsCommitFile(name));
  }
  if (const auto attempt = ParseCommitRecordName(name); attempt.has_value()) {
    ++roles;
    HOLDFAST_EXPECT(CommitRecordName(*attempt) == name && IsCommitFile(name));
  }
  if (const auto companion = ParseCompanionName(name); companion.has_value()) {
    ++roles;
    HOLDFAST_EXPECT(CompanionName(*companion) == name && !companion->file.empty());
  }
  // A name with a role is refused for a user's file.
  HOLDFAST_EXPECT(roles == 0 || WrongDataFileName(name) != nullptr);
  roles += IsDrainLock(name);
  HOLDFAST_EXPECT(roles <= 1);
}

void ReadAsGiven(const std::string& name) {
  // Each is stricter than the next.
  if (WrongSingleFileName(name) == nullptr) {
    HOLDFAST_EXPECT(WrongNewFileName(name) == nullptr);
    for (const CompanionKind kind :
         {CompanionKind::kManifest, CompanionKind::kManifestTemporary, CompanionKind::kTemporary}) {
      const std::string beside = CompanionName({.file = name, .kind = kind, .attempt = {1, 2}});
      const auto companion = ParseCompanionName(beside);
      HOLDFAST_EXPECT(WrongComponent(beside) == nullptr && companion.has_value());
      HOLDFAST_EXPECT(companion->file == name && companion->kind == kind);
    }
  }
  if (WrongNewFileName(name) == nullptr) {
    HOLDFAST_EXPECT(WrongDataFileName(name) == nullptr && WrongComponent(name + ".tmp") == nullptr);
  }
  if (WrongDataFileName(name) == nullptr) HOLDFAST_EXPECT(WrongComponent(name) == nullptr);
  if (WrongComponent(name) == nullptr) {
    HOLDFAST_EXPECT(!name.empty() && name.size() <= 255 && name != "." && name != "..");
    HOLDFAST_EXPECT(name.find('/') == std::string::npos && name.find('\0') == std::string::npos);
  }
}

void ReadAsSeries(const std::string& name) {
  const std::string series = SeriesOf(name);
  const bool has_digit = name.find_first_of("0123456789") != std::string::npos;
  HOLDFAST_EXPECT(has_digit ? absl::StrContains(series, "{}") : series == name);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const std::string name = Name(&input);
  ReadAsDirectory(name);
  ReadAsFile(name);
  ReadAsGiven(name);
  ReadAsSeries(name);
  return 0;
}
