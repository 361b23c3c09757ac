// Files that have manifests of their own (SaveRequest::single_file), and which manifest is whose.
#ifndef HOLDFAST_RUNTIME_VERIFY_SINGLE_FILES_H_
#define HOLDFAST_RUNTIME_VERIFY_SINGLE_FILES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/single_files.h"
#include "runtime/format/manifest.h"

namespace holdfast::verify {

/// Times that a file is looked at anew where saves replace the file under the check.
constexpr int kLooksMax = 8;

/// A file with a manifest of its own.
struct SingleFile {
  format::Manifest manifest;
  directory::Entry entry;  ///< Of the file whose manifest it is.
};

class SingleFiles {
 public:
  /// `names`: all entries of the directory.
  SingleFiles(int directory, const std::vector<std::string>& names)
      : directory_(directory), saves_(directory::FileSavesAmong(names)) {}

  const std::vector<directory::FileSave>& saves() const { return saves_; }

  /// True when a manifest for `file` stands there, of whatever save.
  bool HasManifest(const std::string& file) const;

  /// Returns the file with the manifest of its save, also while saves replace the file. A torch
  /// file holds the attempt of its save. Returns nothing for a foreign file: no manifest has the
  /// attempt. For a file without the structure of an archive returns the newest committed manifest.
  /// \error kDataLoss for a damaged manifest; errors of reading.
  absl::StatusOr<std::optional<SingleFile>> Find(const std::string& file);

 private:
  absl::StatusOr<std::optional<format::Manifest>> ManifestOf(const std::string& file) const;
  absl::StatusOr<format::Manifest> Read(const directory::FileSave& save) const;

  /// Lists the directory again. Returns whether there are other saves.
  bool Refresh();

  const int directory_;
  std::vector<directory::FileSave> saves_;
};

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_SINGLE_FILES_H_
