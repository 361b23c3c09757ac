// The names of files in a checkpoint: which ones there may be, and what rank manifests are called.
#ifndef HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_
#define HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "holdfast/pod.h"

namespace holdfast::format {

/// Null if `name` is one path component that cannot lead out of a directory, otherwise what is
/// wrong with it: empty, "." or "..", a '/', a zero byte, not UTF-8 (it stands in JSON), over 255
/// bytes.
const char* WrongComponent(absl::string_view name);

/// As WrongComponent, and not a name that Holdfast itself gives to files in the same directory: a
/// rank manifest's, a commit record's, or one ending in ".tmp".
const char* WrongDataFileName(absl::string_view name);

/// As WrongDataFileName, for a file that is still to be written: it is NAME.tmp first.
const char* WrongNewFileName(absl::string_view name);

/// "rank-00003-of-00008.manifest.json" and its parts.
std::string ManifestName(uint32_t rank, uint32_t world_size);
/// In a directory that a framework owns, where the files of two attempts may stand side by side
/// until the framework's own last file has changed: "rank-00003-of-00008-<32 hex>.manifest.json".
std::string ManifestName(uint32_t rank, uint32_t world_size, const AttemptId& attempt);
std::string ManifestPrefix();                     // "rank-"
std::string ManifestSuffix(uint32_t world_size);  // "-of-00008.manifest.json"

/// "holdfast.commit-<32 hex>.json": the commit record in a directory that a framework owns.
std::string CommitRecordName(const AttemptId& attempt);
/// The attempt in such a name; nothing for any other name.
std::optional<AttemptId> ParseCommitRecordName(const std::string& name);

/// Whether a file of this name speaks for the others: a rank manifest or a commit record. These
/// go first when a checkpoint is removed.
bool IsCommitFile(const std::string& name);

/// "model-00003-of-00008.safetensors"
std::string ModelFileName(uint32_t rank, uint32_t world_size);

/// Rank and world size of a manifest's name, and its attempt where a framework owns the directory;
/// nothing for any other name.
struct ManifestIdentity {
  uint32_t rank = 0;
  uint32_t world_size = 0;
  std::optional<AttemptId> attempt;
};
std::optional<ManifestIdentity> ParseManifestName(const std::string& name);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_
