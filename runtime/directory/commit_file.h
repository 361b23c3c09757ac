// Commit records on disk, and the file by which a framework commits.
//
// In a directory that a framework owns, complete manifests prove that a save's data is durable. The
// framework's own last file commits the save. Holdfast cannot read that file, so the save's commit
// record holds its digest. The commit files of two saves have one name: of two saves at most one is
// committed.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_COMMIT_FILE_H_
#define HOLDFAST_RUNTIME_DIRECTORY_COMMIT_FILE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/commit_file.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"

namespace holdfast::directory {

/// Reads the commit record `name`. Returns nothing where no record exists: a save of an earlier
/// version, adopted files, or damage (format::Manifest::Recorded).
/// \error kDataLoss; errors of the machine.
absl::StatusOr<std::optional<format::CommitRecord>> ReadCommitRecord(int directory,
                                                                     const std::string& name);

/// Makes the commit record of a complete directory whose rank 0 died before its record. Durable
/// with the next fsync of the directory. \error of reading the manifests and of writing the record.
absl::Status WriteCommitRecord(int directory, const std::string& path, uint32_t world_size);

/// Returns the latest time, in nanoseconds since 1970, in the commit records of a framework's
/// directory; 0 without any record.
uint64_t LatestFrameworkSaveNs(int directory);

/// Returns the names under which the framework may have committed `manifest` without a record.
/// Empty for an unknown framework.
std::vector<std::string> CommitFileNames(const format::Manifest& manifest);

/// Returns true if the commit file `name` has the attempt's id: the file commits that save.
bool NamesAttempt(int directory, const std::string& name, const AttemptId& attempt);

/// True if another program's save has replaced the commit file of `attempt`. The framework's own
/// writer knows nothing of the attempt's manifests, which are stale from then on. A damaged commit
/// file is no other program's: the file's end, size or attempt id shows the owner.
bool IsOfAnotherWriter(int directory, const format::CommitFileDigest& recorded,
                       const AttemptId& attempt);

/// The commit files of a directory, each read once. Attempts with one commit file must be judged by
/// the same bytes, even if a running save replaces the file meanwhile.
class CommitFiles {
 public:
  explicit CommitFiles(int directory) : directory_(directory) {}

  /// Size and digest of the whole file, read through a small buffer; or an error of the machine.
  const absl::StatusOr<format::CommitFileDigest>& Read(const std::string& name);

 private:
  const int directory_;
  std::map<std::string, absl::StatusOr<format::CommitFileDigest>> read_;
};

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_COMMIT_FILE_H_
