#include "runtime/verify/single_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/system.h"
#include "runtime/verify/zip_archives.h"

namespace holdfast::verify {
namespace {

// Torch's id of a file, in which such a save writes its attempt: both halves, decimal.
constexpr absl::string_view kIdRecord = "/.data/serialization_id";
constexpr size_t kHalfDigits = 20;

struct Identity {
  bool whole = false;  // one archive, without a gap
  std::optional<AttemptId> attempt;
};

absl::StatusOr<Identity> Identify(int directory, const std::string& name) {
  Identity identity;
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd,
                            directory::OpenFile(directory, name, /*follow_symlink=*/false));
  struct stat status = {};
  if (sys::Sys().fstat(fd.get(), &status) != 0) return base::ErrnoStatus("stat", name, errno);
  HOLDFAST_ASSIGN_OR_RETURN(const ZipArchives archives,
                            FindZipArchives(fd.get(), name, static_cast<uint64_t>(status.st_size)));
  identity.whole = archives.archives == 1 && archives.gaps.empty();
  for (const format::ZipRecord& record : archives.records) {
    if (!absl::EndsWith(record.name, kIdRecord) || record.bytes != 2 * kHalfDigits) continue;
    HOLDFAST_ASSIGN_OR_RETURN(const std::string text,
                              directory::ReadRange(fd.get(), name, record.begin, record.bytes));
    AttemptId attempt;
    if (absl::SimpleAtoi(text.substr(0, kHalfDigits), &attempt.high) &&
        absl::SimpleAtoi(text.substr(kHalfDigits), &attempt.low)) {
      identity.attempt = attempt;
    }
  }
  return identity;
}

}  // namespace

bool SingleFiles::HasManifest(const std::string& file) const {
  return std::any_of(saves_.begin(), saves_.end(), [&file](const directory::FileSave& save) {
    return save.file == file && save.has_manifest;
  });
}

absl::StatusOr<format::Manifest> SingleFiles::Read(const directory::FileSave& save) const {
  const std::string name = format::CompanionName(
      {.file = save.file, .kind = format::CompanionKind::kManifest, .attempt = save.attempt});
  const auto text = directory::ReadWholeFile(directory_, name, format::kManifestBytesMax);
  absl::StatusOr<format::Manifest> manifest =
      text.ok() ? format::ParseManifest(*text) : text.status();
  if (!manifest.ok()) return base::Annotate(manifest.status(), name);
  if (manifest->attempt != save.attempt || manifest->files.size() != 1 ||
      manifest->files.front().name != save.file) {
    return absl::DataLossError(absl::StrCat(name, ": it is another file's"));
  }
  return manifest;
}

bool SingleFiles::Refresh() {
  const auto names = directory::ListNames(directory_, ".");
  if (!names.ok()) return false;
  std::vector<directory::FileSave> saves = directory::FileSavesAmong(*names);
  const bool others = saves != saves_;
  saves_ = std::move(saves);
  return others;
}

absl::StatusOr<std::optional<SingleFile>> SingleFiles::Find(const std::string& file) {
  for (int look = 1;; ++look) {
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry entry,
                              directory::Look(directory_, file, /*follow_symlink=*/false));
    auto manifest = ManifestOf(file);
    if (manifest.ok() && manifest->has_value()) {
      return SingleFile{.manifest = **std::move(manifest), .entry = entry};
    }
    // A committing save renames its file, and removes the manifests of older saves.
    if (look == kLooksMax || !Refresh()) {
      if (!manifest.ok()) return manifest.status();
      return std::nullopt;
    }
  }
}

absl::StatusOr<std::optional<format::Manifest>> SingleFiles::ManifestOf(
    const std::string& file) const {
  HOLDFAST_ASSIGN_OR_RETURN(const Identity identity, Identify(directory_, file));
  std::optional<format::Manifest> newest;
  absl::Status damage;
  for (const directory::FileSave& save : saves_) {
    if (save.file != file || !save.has_manifest) continue;
    if (identity.attempt == save.attempt) return Read(save);
    if (identity.whole || !save.committed()) continue;
    absl::StatusOr<format::Manifest> manifest = Read(save);
    if (!manifest.ok()) {
      damage = manifest.status();
    } else if (!newest.has_value() || newest->saved_at_ns < manifest->saved_at_ns) {
      newest = *std::move(manifest);
    }
  }
  if (!newest.has_value() && !damage.ok()) return damage;
  return newest;
}

}  // namespace holdfast::verify
