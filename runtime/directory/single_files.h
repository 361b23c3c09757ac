// Files that are saved by themselves (SaveRequest::single_file), and their companions: a manifest
// per save, and the temporary file until the rename that commits. And which manifest is whose.
//
// A manifest without a temporary file belongs to a committed save. Trainer and worker lock a
// temporary file (flock, LOCK_SH) while the save runs.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_SINGLE_FILES_H_
#define HOLDFAST_RUNTIME_DIRECTORY_SINGLE_FILES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/entries.h"
#include "runtime/format/manifest.h"

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

/// Reads the manifest of a save.
/// \error kDataLoss for one that is damaged or of another save; errors of reading.
absl::StatusOr<format::Manifest> ReadManifest(int directory, const FileSave& save);

/// Returns true when a file has the bytes of the manifest's save. Reads up to the first chunk that
/// differs. \error of reading.
absl::StatusOr<bool> HasBytesOf(int directory, const std::string& file,
                                const format::Manifest& manifest);

/// Times that a file is looked at anew where saves replace the file under the check.
constexpr int kLooksMax = 8;

/// The save that wrote a file, by the file's own bytes.
struct FileOrigin {
  std::optional<AttemptId> attempt;
  /// True for a file of this attempt alone; without an attempt, of another program.
  bool certain = false;
};

/// A file with a manifest of its own.
struct SingleFile {
  format::Manifest manifest;
  Entry entry;  ///< Of the file whose manifest it is.
};

class SingleFiles {
 public:
  using OriginOf = absl::StatusOr<FileOrigin> (*)(int directory, const std::string& file);

  /// `names`: all entries of the directory.
  SingleFiles(int directory, const std::vector<std::string>& names, OriginOf origin_of)
      : directory_(directory), origin_of_(origin_of), saves_(FileSavesAmong(names)) {}

  const std::vector<FileSave>& saves() const { return saves_; }

  /// True when a manifest for `file` stands there, of whatever save.
  bool HasManifest(const std::string& file) const;

  /// Returns the file with the manifest of its save, also while saves replace the file. Returns
  /// nothing for a file of certain origin of which no manifest has the attempt. For a file of
  /// uncertain origin returns the newest committed manifest.
  /// \error kDataLoss for a damaged manifest; errors of reading.
  absl::StatusOr<std::optional<SingleFile>> Find(const std::string& file);

 private:
  absl::StatusOr<std::optional<format::Manifest>> ManifestOf(const std::string& file) const;

  /// Lists the directory again. Returns whether there are other saves.
  bool Refresh();

  const int directory_;
  const OriginOf origin_of_;
  std::vector<FileSave> saves_;
};

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_SINGLE_FILES_H_
