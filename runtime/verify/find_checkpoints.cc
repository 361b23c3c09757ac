// FindCheckpoints: the checkpoints below a directory, by the names of their files.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "holdfast/verify.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/single_files.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"

namespace holdfast {
namespace verify {
namespace {

using directory::DirectoryEntry;

template <size_t kCount>
bool EndsWithAny(const std::string& name, const std::array<const char*, kCount>& suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&name](const char* suffix) { return absl::EndsWith(name, suffix); });
}

/// True for ".metadata" and "__RANK.metadata".
bool IsDcpMetadata(absl::string_view name) {
  if (!absl::ConsumeSuffix(&name, ".metadata")) return false;
  if (name.empty()) return true;
  return absl::ConsumePrefix(&name, "__") && !name.empty() &&
         std::all_of(name.begin(), name.end(), absl::ascii_isdigit);
}

/// True for a file that only a checkpoint's own directory holds.
bool MarksCheckpoint(const std::string& name) {
  return format::IsCommitFile(name) || IsDcpMetadata(name) || absl::EndsWith(name, ".distcp");
}

/// True for a file that Verify checks by itself; a run's directory may hold such a file, too.
bool HoldsTensors(const std::string& name) {
  constexpr std::array<const char*, 4> kSuffixes = {".safetensors", ".pt", ".pth", ".ckpt"};
  return EndsWithAny(name, kSuffixes);
}

/// True if a file with a manifest of its own is there, or its save is under way. The manifest of a
/// file that is gone has no effect.
bool HoldsSingleFile(const std::vector<DirectoryEntry>& entries) {
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) names.push_back(entry.name);
  const std::vector<directory::FileSave> saves = directory::FileSavesAmong(names);
  return std::any_of(saves.begin(), saves.end(), [&names](const directory::FileSave& save) {
    return save.has_manifest &&
           (save.has_temporary || std::count(names.begin(), names.end(), save.file) > 0);
  });
}

void Walk(const std::string& path, FoundCheckpoints* found) {
  const auto fd = directory::OpenDirectory(path);
  const auto entries = fd.ok() ? directory::ListDirectory(fd->get(), path)
                               : absl::StatusOr<std::vector<DirectoryEntry>>(fd.status());
  if (absl::IsNotFound(entries.status())) return;
  // Of an ext file system's fsck, for root alone.
  const bool is_of_fsck = directory::SplitPath(path).name == "lost+found";
  if (is_of_fsck && absl::IsPermissionDenied(entries.status())) return;
  const auto any_file = [&entries](bool (*is)(const std::string&)) {
    return std::any_of(entries->begin(), entries->end(), [is](const DirectoryEntry& entry) {
      return !entry.is_directory && is(entry.name);
    });
  };
  if (!entries.ok() || any_file(MarksCheckpoint)) {
    found->checkpoints.push_back(path);
    return;
  }
  if (any_file(HoldsTensors) || HoldsSingleFile(*entries)) found->checkpoints.push_back(path);
  for (const DirectoryEntry& entry : *entries) {
    if (!entry.is_directory) continue;
    const std::string below = absl::StrCat(path, absl::EndsWith(path, "/") ? "" : "/", entry.name);
    if (format::IsUncommittedName(entry.name)) {
      found->uncommitted.push_back(below);
    } else {
      Walk(below, found);
    }
  }
}

}  // namespace
}  // namespace verify

FoundCheckpoints FindCheckpoints(const std::string& path) {
  FoundCheckpoints found;
  const std::string name = directory::SplitPath(path).name;
  if (!format::IsUncommittedName(name)) verify::Walk(path, &found);
  if (found.checkpoints.empty()) found.checkpoints.push_back(path);
  return found;
}

}  // namespace holdfast
