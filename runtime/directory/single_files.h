// Files that are saved by themselves (SaveRequest::single_file), and their companions: a manifest
// per save, and the temporary file until the rename that commits.
//
// A manifest without a temporary file belongs to a committed save. Trainer and worker lock a
// temporary file (flock, LOCK_SH) while the save runs.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_SINGLE_FILES_H_
#define HOLDFAST_RUNTIME_DIRECTORY_SINGLE_FILES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

/// The companions of one save of one file.
struct FileSave {
  std::string file;
  AttemptId attempt;
  bool has_manifest = false;
  bool has_temporary = false;
  bool has_manifest_temporary = false;

  bool committed() const { return has_manifest && !has_temporary; }
  bool operator==(const FileSave&) const = default;
};

/// Groups the companions among the names of a directory by file and attempt.
std::vector<FileSave> FileSavesAmong(const std::vector<std::string>& names);

/// Makes and locks the temporary file of a save of `file`. The file system may lack the lock.
/// \error kAlreadyExists without `replace` when anything has the name; kFailedPrecondition for
/// anything but a regular file; errors of open.
absl::StatusOr<base::UniqueFd> BeginSingleFile(int directory, const std::string& file,
                                               const AttemptId& attempt, bool replace);

/// Returns the attempts of further companions of `file`. Called after BeginSingleFile: then of two
/// saves only the later lists the earlier.
absl::StatusOr<std::vector<AttemptId>> OlderSaves(int directory, const std::string& file,
                                                  const AttemptId& attempt);

/// Returns true when the save's file has its name.
bool IsCommitted(int directory, const std::string& file, const AttemptId& attempt);

/// Removes the companions of one save, the manifest first and durably.
/// \error of the fsync, or of an unlink.
absl::Status RemoveCompanions(int directory, const FileSave& save);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_SINGLE_FILES_H_
