// The manifests of one attempt in a directory, and the findings about them and their files.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_ATTEMPT_READER_H_
#define HOLDFAST_RUNTIME_DIRECTORY_ATTEMPT_READER_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "holdfast/recovery.h"
#include "runtime/directory/commit_file.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/findings.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/file_names.h"
#include "runtime/format/manifest.h"

namespace holdfast::directory {

/// Manifests by their names.
using NamedManifests = std::vector<std::pair<format::ManifestIdentity, std::string>>;

/// The time in a manifest or a record.
absl::Time FromNanoseconds(uint64_t since_1970);

class AttemptReader {
 public:
  /// `attempt`: the attempt in the files' names; none in a directory that Holdfast owns.
  AttemptReader(int directory, const ReadCheckpointOptions& options,
                std::optional<AttemptId> attempt, CommitFiles* commit_files)
      : directory_(directory),
        options_(options),
        framework_attempt_(attempt),
        commit_files_read_(commit_files) {}

  /// Reads the commit record and the manifests `named`, and checks the files that they name.
  void Read(const NamedManifests& named);

  /// The commit file that a record proves to be of this attempt; empty: none.
  std::string committed_by() const { return committed_ ? record_->commit_file->name : ""; }

  /// Complete, and of an earlier version, which made no commit record for a framework's commit
  /// file.
  bool unrecorded() const {
    return framework_attempt_.has_value() && unrecorded_ && !recorded_version_ && !incomplete();
  }

  /// The save, or a recovery in its place, makes a commit record before the commit, and the record
  /// is missing.
  bool lacks_record() const { return unrecorded_ && recorded_version_; }

  /// True if another program's save has replaced the commit file of this attempt.
  bool ReplacedByAnotherWriter() const;

  /// Judges a commit file that no record proves to be of this attempt. Called after all attempts
  /// are read. `committed_by`: commit files proven to be of other attempts. `unrecorded`: an
  /// attempt without a record exists and may have written the differing file.
  void JudgeCommitFile(const std::set<std::string>& committed_by, bool unrecorded);

  const std::vector<Finding>& findings() const { return findings_; }
  const CheckpointInfo& info() const { return info_; }
  const std::string& recorded_name() const { return recorded_name_; }
  const std::vector<AttemptId>& replaces() const { return replaces_; }
  bool incomplete() const;
  bool NewerThan(const AttemptReader& other) const;

  /// True when an attempt that names `named` has replaced files of this attempt.
  bool Superseded(const std::set<std::string>& named) const;

  void MoveTo(CheckpointFiles* out, std::set<std::string>* named);

 private:
  void Add(Finding finding);
  std::string record_name() const;
  std::string ManifestName(uint32_t rank) const;
  bool TrustsRecord() const;
  void TakeRecord(bool any_manifest);
  void CompareWithRecord(const std::string& name, uint32_t rank, const std::string& text);
  void ReadManifest(const format::ManifestIdentity& identity, const std::string& name,
                    int64_t modified_ns);
  void TakeManifest(format::Manifest manifest, const std::string& name, int64_t modified_ns);
  void AddMissingRanks();
  void CheckCommitFile();
  bool NamedByCommitFile() const;
  Finding MissingRecord() const;
  void LookForCommitFile();

  const int directory_;
  const ReadCheckpointOptions& options_;
  const std::optional<AttemptId> framework_attempt_;
  CommitFiles* const commit_files_read_;
  std::vector<format::Manifest> manifests_;
  std::vector<Finding> findings_;
  bool first_seen_ = false;
  CheckpointInfo info_;  // from the first manifest; bytes of all manifests
  std::string recorded_name_;
  std::optional<Digest> replicas_;  // of the first manifest
  std::vector<AttemptId> replaces_;
  std::optional<format::CommitRecord> record_;
  bool unrecorded_ = false;                      // there is no commit record
  bool recorded_version_ = false;                // the manifests say that there is one
  std::set<std::string> possible_commit_files_;  // without a record
  // of this attempt, or of an attempt with the same commit file
  std::set<std::string> commit_files_;
  bool committed_ = false;          // proven by the digest in the record
  std::optional<Finding> differs_;  // the finding about the commit file, if not committed
  int64_t modified_ns_ = 0;         // when the last manifest was written
  std::set<uint32_t> ranks_;
  std::set<std::string> named_;
};

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_ATTEMPT_READER_H_
