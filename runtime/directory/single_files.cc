#include "runtime/directory/single_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::directory {
namespace {

using format::CompanionKind;

constexpr absl::Duration kTimeLockedMax = absl::Seconds(30);
constexpr absl::Duration kMarkPoll = absl::Milliseconds(10);

std::string NameOf(const std::string& file, const AttemptId& attempt, CompanionKind kind) {
  return format::CompanionName({.file = file, .kind = kind, .attempt = attempt});
}

absl::Status CheckTarget(int directory, const std::string& file, bool replace) {
  HOLDFAST_ASSIGN_OR_RETURN(const Entry entry, Look(directory, file, /*follow_symlink=*/false));
  if (entry.kind == EntryKind::kNothing) return absl::OkStatus();
  if (!replace) {
    return absl::AlreadyExistsError(absl::StrCat(
        file, ": it exists already; choose another name, remove it, or ask to replace it"));
  }
  if (entry.kind == EntryKind::kFile) return absl::OkStatus();
  const char* const what = entry.kind == EntryKind::kDirectory ? "a directory"
                           : entry.kind == EntryKind::kSymlink ? "a symbolic link"
                                                               : "no regular file";
  return absl::FailedPreconditionError(
      absl::StrCat(file, ": it is ", what, "; a save replaces files alone"));
}

absl::Status Unlink(int directory, const std::string& name) {
  if (sys::Sys().unlinkat(directory, name.c_str(), 0) == 0 || errno == ENOENT)
    return absl::OkStatus();
  return base::ErrnoStatus("remove", name, errno);
}

}  // namespace

std::vector<FileSave> FileSavesAmong(const std::vector<std::string>& names) {
  std::map<std::tuple<std::string, uint64_t, uint64_t>, FileSave> saves;
  for (const std::string& name : names) {
    const auto companion = format::ParseCompanionName(name);
    if (!companion.has_value()) continue;
    const AttemptId& attempt = companion->attempt;
    FileSave& save = saves[{companion->file, attempt.high, attempt.low}];
    save.file = companion->file;
    save.attempt = attempt;
    save.has_manifest |= companion->kind == CompanionKind::kManifest;
    save.has_temporary |= companion->kind == CompanionKind::kTemporary;
    save.has_manifest_temporary |= companion->kind == CompanionKind::kManifestTemporary;
  }
  std::vector<FileSave> out;
  for (auto& [key, save] : saves) out.push_back(std::move(save));
  return out;
}

absl::StatusOr<base::UniqueFd> BeginSingleFile(int directory, const std::string& file,
                                               const AttemptId& attempt, bool replace) {
  HOLDFAST_RETURN_IF_ERROR(CheckTarget(directory, file, replace));
  const std::string name = NameOf(file, attempt, CompanionKind::kTemporary);
  const absl::Time deadline = base::Now() + kTimeLockedMax;
  while (true) {
    base::UniqueFd fd(sys::OpenOwned(directory, name.c_str(),
                                     O_CREAT | O_RDONLY | O_NOFOLLOW | O_CLOEXEC, sys::kFileMode));
    if (!fd.valid()) return base::ErrnoStatus("create", name, errno);
    const bool locked =
        sys::Uninterrupted([&] { return sys::Sys().flock(fd.get(), LOCK_SH | LOCK_NB); }) == 0;
    // Where the file system lacks the lock, a recovery goes by the file's age.
    const bool free = locked || errno != EWOULDBLOCK;
    if (free && NameRefersTo(directory, name, fd.get())) return fd;
    // A recovery has taken the file for a dead save's, before the lock, and removes it.
    if (base::Now() > deadline)
      return absl::UnavailableError(absl::StrCat(name, ": a recovery keeps it locked"));
    Pause(kMarkPoll);
  }
}

absl::StatusOr<std::vector<AttemptId>> OlderSaves(int directory, const std::string& file,
                                                  const AttemptId& attempt) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(directory, file));
  std::vector<AttemptId> older;
  for (const FileSave& save : FileSavesAmong(names)) {
    if (save.file == file && save.attempt != attempt) older.push_back(save.attempt);
  }
  return older;
}

bool IsCommitted(int directory, const std::string& file, const AttemptId& attempt) {
  const auto exists = [&](CompanionKind kind) {
    const auto entry = Look(directory, NameOf(file, attempt, kind), /*follow_symlink=*/false);
    return !entry.ok() || entry->kind != EntryKind::kNothing;
  };
  return exists(CompanionKind::kManifest) && !exists(CompanionKind::kTemporary);
}

absl::Status RemoveCompanions(int directory, const FileSave& save) {
  if (save.has_manifest) {
    HOLDFAST_RETURN_IF_ERROR(
        Unlink(directory, NameOf(save.file, save.attempt, CompanionKind::kManifest)));
    // A manifest without a temporary file belongs to a committed save. No crash may leave such a
    // manifest.
    if (save.has_temporary)
      HOLDFAST_RETURN_IF_ERROR(SyncDirectory(directory, absl::StrCat("of ", save.file)));
  }
  HOLDFAST_RETURN_IF_ERROR(
      Unlink(directory, NameOf(save.file, save.attempt, CompanionKind::kManifestTemporary)));
  return Unlink(directory, NameOf(save.file, save.attempt, CompanionKind::kTemporary));
}

absl::StatusOr<format::Manifest> ReadManifest(int directory, const FileSave& save) {
  const std::string name = NameOf(save.file, save.attempt, CompanionKind::kManifest);
  const auto text = ReadWholeFile(directory, name, format::kManifestBytesMax);
  absl::StatusOr<format::Manifest> manifest =
      text.ok() ? format::ParseManifest(*text) : text.status();
  if (!manifest.ok()) return base::Annotate(manifest.status(), name);
  if (manifest->attempt != save.attempt || manifest->files.size() != 1 ||
      manifest->files.front().name != save.file) {
    return absl::DataLossError(absl::StrCat(name, ": it is another file's"));
  }
  return manifest;
}

absl::StatusOr<bool> HasBytesOf(int directory, const std::string& file,
                                const format::Manifest& manifest) {
  const format::Manifest::File& recorded = manifest.files.front();
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd,
                            OpenFile(directory, file, /*follow_symlink=*/false));
  HOLDFAST_ASSIGN_OR_RETURN(const Entry entry, Look(directory, file, /*follow_symlink=*/false));
  if (entry.bytes != recorded.bytes) return false;
  uint64_t begin = 0;
  for (const Digest& chunk : recorded.chunks) {
    const uint64_t bytes = std::min<uint64_t>(recorded.chunk_bytes, recorded.bytes - begin);
    HOLDFAST_ASSIGN_OR_RETURN(const std::string found, ReadRange(fd.get(), file, begin, bytes));
    if (digest::Of(found.data(), found.size()) != chunk) return false;
    begin += bytes;
  }
  return true;
}

bool SingleFiles::HasManifest(const std::string& file) const {
  return std::any_of(saves_.begin(), saves_.end(), [&file](const FileSave& save) {
    return save.file == file && save.has_manifest;
  });
}

bool SingleFiles::Refresh() {
  const auto names = ListNames(directory_, ".");
  if (!names.ok()) return false;
  std::vector<FileSave> saves = FileSavesAmong(*names);
  const bool others = saves != saves_;
  saves_ = std::move(saves);
  return others;
}

absl::StatusOr<std::optional<SingleFile>> SingleFiles::Find(const std::string& file) {
  for (int look = 1;; ++look) {
    HOLDFAST_ASSIGN_OR_RETURN(const Entry entry, Look(directory_, file, /*follow_symlink=*/false));
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
  HOLDFAST_ASSIGN_OR_RETURN(const FileOrigin origin, origin_of_(directory_, file));
  std::optional<format::Manifest> newest;
  absl::Status damage;
  for (const FileSave& save : saves_) {
    if (save.file != file || !save.has_manifest) continue;
    if (origin.attempt == save.attempt) return ReadManifest(directory_, save);
    if (origin.certain || !save.committed()) continue;
    absl::StatusOr<format::Manifest> manifest = ReadManifest(directory_, save);
    if (!manifest.ok()) {
      damage = manifest.status();
    } else if (!newest.has_value() || newest->saved_at_ns < manifest->saved_at_ns) {
      newest = *std::move(manifest);
    }
  }
  if (!newest.has_value() && !damage.ok()) return damage;
  return newest;
}

}  // namespace holdfast::directory
