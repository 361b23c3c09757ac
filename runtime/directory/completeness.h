// What makes a directory a complete checkpoint: the manifests of all ranks of one attempt are
// there, parse, and name files of exactly the recorded sizes. One answer in two views: all findings
// (ReadCheckpoint, for load and verify), and one state (Inspect, for listing and recovery). Rank
// 0's commit record, where there is one, says the same in one small read (InspectCommitted).
#ifndef HOLDFAST_RUNTIME_DIRECTORY_COMPLETENESS_H_
#define HOLDFAST_RUNTIME_DIRECTORY_COMPLETENESS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/recovery.h"
#include "runtime/directory/findings.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"

namespace holdfast::directory {

/// A directory's manifests, and what is wrong with them and with the files that they name. Files'
/// contents are not looked at.
struct CheckpointFiles {
  std::vector<std::string> names;           ///< All entries of the directory, sorted.
  uint32_t manifests_found = 0;             ///< By their names; 0: no Holdfast checkpoint at all.
  std::vector<format::Manifest> manifests;  ///< Those that parsed, the newest attempt's first.
  std::vector<std::string> unnamed;         ///< Entries that no manifest names.
  std::vector<Finding> findings;            ///< Empty: complete.
  std::optional<format::CommitRecord> record;  ///< Of the newest attempt, if it is sound.
  /// By which a framework has committed; those of `unproven` have no digest in any record.
  std::set<std::string> commit_files;
  std::set<std::string> unproven;
  bool partial = false;  ///< The directory's name says that it is not committed.
};

struct ReadCheckpointOptions {
  std::optional<uint32_t> keep_rank;  ///< Keep only this rank's manifest; all are checked.
  /// Under a sound commit record read no manifest but that of `keep_rank`. The others need be
  /// there.
  bool trust_record = false;
  size_t findings_max = 10'000;  ///< More than this are dropped.
};

/// In a directory that a framework owns, the files of an attempt that is not complete are left out
/// if those of another are: it failed, or is still being written. So are those of an attempt some
/// of whose files a newer one has written anew. An attempt is complete there if its commit record
/// has the digest of the framework's commit file; without a record, if such a file is there.
/// \error when the directory itself cannot be listed.
absl::StatusOr<CheckpointFiles> ReadCheckpoint(int directory, const std::string& path,
                                               const ReadCheckpointOptions& options);

/// What a directory holds, whatever its own name is.
struct Inspection {
  enum class State {
    kComplete,
    kIncomplete,  ///< Manifests or files are missing: it was never committed.
    kDamaged,     ///< A manifest or a file's size is not as it was written: storage is at fault.
    kUnreadable,  ///< An error of the machine (EIO, EMFILE, ...): nothing is known.
  };
  State state = State::kIncomplete;
  absl::Status reason;        ///< Why it is not complete; OK if it is.
  bool has_manifest = false;  ///< A file has a rank manifest's name, or the commit record's.
  CheckpointInfo info;  ///< Without `name` and `path`; of what is sound as far as it is known.
  std::string recorded_name;        ///< The final name that its manifests carry.
  std::vector<AttemptId> replaces;  ///< What it may take the place of; a record does not say it.
};

/// The gravest finding decides. Manifests with an attempt in their name do not count: a framework
/// owns the directory, and the framework's own last file says whether it is complete.
Inspection Inspect(int directory);

/// What a sound commit record says, by one small read: rank 0 wrote it when all manifests were
/// durable. What happened to the files since is not looked at. None without a sound record.
std::optional<Inspection> InspectRecord(int directory);

/// InspectRecord, and where there is no sound record, Inspect.
Inspection InspectCommitted(int directory);

/// Reads one manifest and looks at the files that it names. `digest`: of the manifest, as a commit
/// record has it. \error kDataLoss: damaged, or not the one of its name or record; as ToStatus.
absl::StatusOr<format::Manifest> ReadManifest(int directory, const std::string& path,
                                              const std::string& name,
                                              const std::optional<Digest>& digest);

/// The manifest in `directory` that names `file`.
/// \error kNotFound when none does; the damage, where none does but one cannot be read.
absl::StatusOr<format::Manifest> FindManifestOf(int directory, const std::string& path,
                                                const std::string& file);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_COMPLETENESS_H_
