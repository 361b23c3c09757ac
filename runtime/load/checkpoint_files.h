// What makes a directory a complete checkpoint: the manifests of all ranks of one attempt are
// there, parse, and name files of exactly the recorded sizes.
#ifndef HOLDFAST_RUNTIME_LOAD_CHECKPOINT_FILES_H_
#define HOLDFAST_RUNTIME_LOAD_CHECKPOINT_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/verify.h"
#include "runtime/format/manifest.h"

namespace holdfast::load {

/// A fault and what it makes of the checkpoint.
struct Finding {
  Verdict verdict = Verdict::kCorrupt;
  absl::StatusCode code = absl::StatusCode::kDataLoss;
  Fault fault;
};

/// A directory's manifests, and what is wrong with them and with the files that they name. Files'
/// contents are not looked at.
struct CheckpointFiles {
  std::vector<std::string> names;           ///< All entries of the directory, sorted.
  uint32_t manifests_found = 0;             ///< By their names; 0: no Holdfast checkpoint at all.
  std::vector<format::Manifest> manifests;  ///< Those that parsed, the newest attempt's first.
  std::vector<std::string> unnamed;         ///< Entries that no manifest names.
  std::vector<Finding> findings;            ///< Empty: complete.
  bool partial = false;                     ///< The directory's name says that it is not committed.
};

struct ReadCheckpointOptions {
  std::optional<uint32_t> keep_rank;  ///< Keep only this rank's manifest; all are checked.
  size_t findings_max = 10'000;       ///< More than this are dropped.
};

/// In a directory that a framework owns, the files of an attempt that is not complete are left out
/// if those of another are: it failed, or is still being written. So are those of an attempt some
/// of whose files a newer one has written anew. \error when the directory itself cannot be listed.
absl::StatusOr<CheckpointFiles> ReadCheckpoint(int directory, const std::string& path,
                                               const ReadCheckpointOptions& options);

/// What is wrong with the files that a manifest names: not there, no file, of another size.
std::vector<Finding> CheckNamedFiles(int directory, const format::Manifest& manifest);

/// The manifest in `directory` that names `file`.
/// \error kNotFound when none does; the damage, where none does but one cannot be read.
absl::StatusOr<format::Manifest> FindManifestOf(int directory, const std::string& path,
                                                const std::string& file);

/// Rank and world size of a manifest's name, and its attempt where a framework owns the directory;
/// nothing for any other name.
struct ManifestIdentity {
  uint32_t rank = 0;
  uint32_t world_size = 0;
  std::optional<AttemptId> attempt;
};
std::optional<ManifestIdentity> ParseManifestName(const std::string& name);

/// Whether a directory of this name is no checkpoint, however whole it looks: still being written,
/// or left so, fenced by a recovery, or let go by retention.
bool IsUncommittedName(const std::string& name);

/// The gravest finding as an error of `path`; OK if there is none.
absl::Status ToStatus(const std::vector<Finding>& findings, const std::string& path);

/// Corrupt before unreadable before incomplete before sound: proven damage is said first, then
/// what could not be judged.
Verdict Worse(Verdict a, Verdict b);

/// What the status of reading `file` makes of it: its damage, or that it cannot be read.
Finding FindingOf(const absl::Status& status, const std::string& file, const char* reason);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_CHECKPOINT_FILES_H_
