// The names of files in a checkpoint: allowed names, and the names of rank manifests.
#ifndef HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_
#define HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "holdfast/pod.h"

namespace holdfast::format {

/// Returns null if `name` is one path component that cannot lead out of a directory. Otherwise the
/// fault: empty, "." or "..", a '/', a zero byte, not UTF-8 (names go into JSON), over 255 bytes.
const char* WrongComponent(absl::string_view name);

/// As WrongComponent. Also refuses names that Holdfast gives to files of the same directory: a rank
/// manifest's, a commit record's, a companion's of a single file, or any name ending in ".tmp".
const char* WrongDataFileName(absl::string_view name);

/// As WrongDataFileName, for a file not yet written, which is NAME.tmp first.
const char* WrongNewFileName(absl::string_view name);

/// "rank-00003-of-00008.manifest.json" and its parts.
std::string ManifestName(uint32_t rank, uint32_t world_size);
/// The name in a directory that a framework owns: "rank-00003-of-00008-<32 hex>.manifest.json".
/// There the files of two attempts may coexist until the framework's own last file has changed.
std::string ManifestName(uint32_t rank, uint32_t world_size, const AttemptId& attempt);
std::string ManifestPrefix();                     // "rank-"
std::string ManifestSuffix(uint32_t world_size);  // "-of-00008.manifest.json"

/// "holdfast.commit-<32 hex>.json": the commit record in a directory that a framework owns.
std::string CommitRecordName(const AttemptId& attempt);
/// Returns the attempt in such a name; nothing for any other name.
std::optional<AttemptId> ParseCommitRecordName(const std::string& name);

/// True for a rank manifest or a commit record. A removal begins with these files.
bool IsCommitFile(const std::string& name);

/// The kinds of files that stand beside a single file (SaveRequest::single_file).
enum class CompanionKind {
  kManifest,           ///< ".NAME.holdfast-<32 hex>.json"
  kManifestTemporary,  ///< ".NAME.holdfast-<32 hex>.json.tmp"
  kTemporary,          ///< ".NAME.holdfast-<32 hex>.tmp": the file itself, until its rename
};
/// A companion of the single file `file`, of one save of that file.
struct Companion {
  std::string file;
  CompanionKind kind = CompanionKind::kManifest;
  AttemptId attempt;
};
std::string CompanionName(const Companion& companion);
/// Returns the companion of that name; nothing for any other name.
std::optional<Companion> ParseCompanionName(const std::string& name);

/// True for ".holdfast-drain-<8 hex>.lock": the lock of the process that copies a directory's
/// checkpoints to one second place (python/holdfast/drain). The file stays, and is always empty.
bool IsDrainLock(absl::string_view name);

/// As WrongNewFileName, for a single file: its companions' names are longer than its own.
const char* WrongSingleFileName(absl::string_view name);

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
