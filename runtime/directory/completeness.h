// The rule of a complete checkpoint: the manifests of all ranks of one attempt exist, parse, and
// name files of exactly the recorded sizes. The rule has two views: all findings (ReadCheckpoint,
// for load and verify), and one state (Inspect, for listing and recovery). Rank 0's commit record,
// if present, gives the same answer in one small read (InspectCommitted).
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

/// A directory's manifests, and the findings about them and their files. File contents are not
/// read.
struct CheckpointFiles {
  std::vector<std::string> names;  ///< All entries of the directory, sorted.
  uint32_t manifests_found = 0;    ///< Counted by name; 0: not a Holdfast checkpoint.
  /// The manifests that parsed, the newest attempt's first.
  std::vector<format::Manifest> manifests;
  std::vector<std::string> unnamed;            ///< Entries that no manifest names.
  std::vector<Finding> findings;               ///< Empty: complete.
  std::optional<format::CommitRecord> record;  ///< Of the newest attempt, if the record is sound.
  /// Commit files of a framework; no record has a digest of the `unproven` files.
  std::set<std::string> commit_files;
  std::set<std::string> unproven;
  bool partial = false;  ///< The directory has a name of an uncommitted checkpoint.
};

struct ReadCheckpointOptions {
  std::optional<uint32_t> keep_rank;  ///< Keep only this rank's manifest; all are checked.
  /// Under a sound commit record reads only the manifest of `keep_rank`. The other manifests must
  /// exist.
  bool trust_record = false;
  bool uncommitted = false;      ///< The commit record may be missing.
  size_t findings_max = 10'000;  ///< Further findings are dropped.
};

/// Reads the manifests of a directory and checks sizes and commit files. In a directory that a
/// framework owns:
/// - An incomplete attempt (failed, or still being written) is left out beside a complete attempt.
/// - An attempt is left out when a newer attempt has replaced some of its files.
/// - An attempt is complete if its commit record has the digest of the framework's commit file.
///   Without a record, a commit file must exist.
/// \error when the directory itself cannot be listed.
absl::StatusOr<CheckpointFiles> ReadCheckpoint(int directory, const std::string& path,
                                               const ReadCheckpointOptions& options);

/// The state of a directory, regardless of the directory's own name.
struct Inspection {
  /// kSound: complete. kIncomplete: manifests or files are missing, the save never committed.
  /// kCorrupt: a manifest or a file's size is not as written, a storage fault. kUnreadable: an
  /// error of the machine (EIO, EMFILE, ...), the state is unknown.
  Verdict state = Verdict::kIncomplete;
  absl::Status reason;        ///< Why the directory is not complete; OK if complete.
  bool has_manifest = false;  ///< A file has a rank manifest's name, or the commit record's.
  CheckpointInfo info;        ///< Without `name` and `path`; filled from the sound manifests.
  std::string recorded_name;  ///< The final name in the manifests.
  /// The attempts that the save may replace; absent from a commit record.
  std::vector<AttemptId> replaces;
  bool lacks_record = false;  ///< Complete but for the commit record: see InspectUncommitted.
};

/// Returns the state of the gravest finding. Manifests with an attempt in their name do not count:
/// the framework's own last file commits that directory.
Inspection Inspect(int directory);

/// As Inspect, of a directory before the commit, where a missing commit record is no finding: a
/// recovery makes the record.
Inspection InspectUncommitted(int directory);

/// Returns the content of a sound commit record, by one small read. Rank 0 writes the record when
/// all manifests are durable. Later damage of the files is not detected. Returns nothing without a
/// sound record.
std::optional<Inspection> InspectRecord(int directory);

/// InspectRecord, and where there is no sound record, Inspect.
Inspection InspectCommitted(int directory);

/// Reads one manifest and checks the files that it names. `digest`: of the manifest, from a commit
/// record.
/// \error kDataLoss: damaged, or another manifest than its name or record says; as ToStatus.
absl::StatusOr<format::Manifest> ReadManifest(int directory, const std::string& path,
                                              const std::string& name,
                                              const std::optional<Digest>& digest);

/// Returns the manifest that names `file`. In a directory that a framework owns: of those that
/// ReadCheckpoint keeps, the newest attempt's first, and no stale manifest.
/// \error kNotFound when no manifest names `file`; the damage, when a manifest is unreadable as
/// well.
absl::StatusOr<format::Manifest> FindManifestOf(int directory, const std::string& path,
                                                const std::string& file);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_COMPLETENESS_H_
