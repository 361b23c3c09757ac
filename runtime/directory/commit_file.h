// Commit records on disk, and the file by which a framework commits.
//
// In a directory that a framework owns, complete manifests say that a save's data is durable, and
// the framework's own last file says that it counts. The save's commit record has that file's
// digest, because nobody here can read it. Files by which two saves commit have one name: of two
// saves at most one is committed.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_COMMIT_FILE_H_
#define HOLDFAST_RUNTIME_DIRECTORY_COMMIT_FILE_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/commit_file.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"

namespace holdfast::directory {

/// The commit record of that name. Nothing where there is none: a save of an earlier version, or
/// files that were adopted. \error kDataLoss; errors of the machine.
absl::StatusOr<std::optional<format::CommitRecord>> ReadCommitRecord(int directory,
                                                                     const std::string& name);

/// Names under which the framework may have committed what `manifest` names, where there is no
/// record. Empty: it is no framework whose names are known.
std::vector<std::string> CommitFileNames(const format::Manifest& manifest);

/// The commit files of a directory, each read once: attempts that are judged by one file must see
/// the same, although a save may put another one in its place meanwhile.
class CommitFiles {
 public:
  explicit CommitFiles(int directory) : directory_(directory) {}

  /// Size and digest of the whole file, read through a small buffer; an error of the machine.
  const absl::StatusOr<format::CommitFileDigest>& Read(const std::string& name);

 private:
  const int directory_;
  std::map<std::string, absl::StatusOr<format::CommitFileDigest>> read_;
};

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_COMMIT_FILE_H_
