#include "runtime/recovery/single_files.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/directory/single_files.h"
#include "runtime/format/file_names.h"
#include "runtime/format/manifest.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast {
namespace recovery {
namespace {

using directory::EntryKind;
using directory::FileSave;
using format::CompanionKind;

constexpr absl::Duration kWriterPoll = absl::Milliseconds(20);

std::string NameOf(const FileSave& save, CompanionKind kind) {
  return format::CompanionName({.file = save.file, .kind = kind, .attempt = save.attempt});
}

/// True while a save has the file open. Otherwise `fd` has its lock until it is closed.
bool IsLocked(int fd) {
  return sys::Uninterrupted([&] { return sys::Sys().flock(fd, LOCK_EX | LOCK_NB); }) != 0 &&
         errno == EWOULDBLOCK;
}

class Settling {
 public:
  Settling(int parent, const directory::FileSystem& file_system, const RecoveryOptions& options,
           RecoveryReport* report)
      : parent_(parent), file_system_(file_system), options_(options), report_(report) {}

  absl::Status Run(std::vector<FileSave> saves) {
    saves_ = std::move(saves);
    for (FileSave& save : saves_) {
      if (save.has_temporary) HOLDFAST_RETURN_IF_ERROR(SettleUncommitted(&save));
    }
    // After the promotions, which make older manifests superfluous.
    for (const FileSave& save : saves_) {
      if (!save.has_temporary && IsSuperfluous(save)) Remove(save);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status SettleUncommitted(FileSave* save) {
    const std::string name = NameOf(*save, CompanionKind::kTemporary);
    const auto fd = directory::OpenFile(parent_, name, /*follow_symlink=*/false);
    if (absl::IsNotFound(fd.status())) return absl::OkStatus();  // committed meanwhile
    if (!fd.ok()) return Keep(*save, fd.status().message());
    // Under the lock no save begins with the file: its trainer makes a new file.
    if (IsLocked(fd->get())) return Keep(*save, "a save of it is running");
    if (!directory::NameRefersTo(parent_, name, fd->get())) return absl::OkStatus();
    if (!file_system_.local && !IsOld(name)) {
      return Keep(*save, absl::StrCat("locks on ", file_system_.name,
                                      " do not tell whether a save of it is running"));
    }
    const absl::StatusOr<bool> complete = IsComplete(*save);
    if (!complete.ok()) return Keep(*save, complete.status().message());
    if (*complete) return Promote(save, name);
    if (!options_.clean_up) return Keep(*save, "incomplete");
    Remove(*save);
    *save = FileSave{};
    return absl::OkStatus();
  }

  /// True for a save that lacks its last rename alone, and that no later save has overtaken.
  /// \error of the machine, or kDataLoss for a state that no save leaves: no verdict.
  absl::StatusOr<bool> IsComplete(const FileSave& save) const {
    if (!save.has_manifest) return false;
    const absl::StatusOr<format::Manifest> manifest = directory::ReadManifest(parent_, save);
    if (absl::IsNotFound(manifest.status())) return false;  // A later save has removed it.
    HOLDFAST_RETURN_IF_ERROR(manifest.status());
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry temporary,
                              Entry(NameOf(save, CompanionKind::kTemporary)));
    if (temporary.bytes != manifest->files.front().bytes) {
      return absl::DataLossError(absl::StrCat(
          temporary.bytes, " bytes long, and its manifest says ", manifest->files.front().bytes));
    }
    return !IsOvertaken(save, *manifest);
  }

  /// True when the file under the save's name is older than the save's manifest, or the file of a
  /// replaced save, or missing.
  absl::StatusOr<bool> MayTakeName(const FileSave& save) const {
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry standing, Entry(save.file));
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry manifest,
                              Entry(NameOf(save, CompanionKind::kManifest)));
    // Both times: the clock may have gone back, and a chmod changes the manifest's second one.
    const bool is_older =
        standing.changed_ns <= manifest.changed_ns && standing.modified_ns <= manifest.modified_ns;
    if (standing.kind == EntryKind::kNothing || is_older) return true;
    // Of two saves that overlap, the older may take the name behind the younger's manifest.
    for (const FileSave& other : saves_) {
      if (other.file != save.file || !other.committed()) continue;
      HOLDFAST_ASSIGN_OR_RETURN(const format::Manifest replaced,
                                directory::ReadManifest(parent_, other));
      HOLDFAST_ASSIGN_OR_RETURN(const bool same,
                                directory::HasBytesOf(parent_, save.file, replaced));
      if (same) return true;
    }
    return false;
  }

  absl::Status Promote(FileSave* save, const std::string& name) {
    if (!options_.promote) return Keep(*save, "complete, but promotion is switched off");
    const absl::StatusOr<bool> may = MayTakeName(*save);
    if (!may.ok()) return Keep(*save, may.status().message());
    if (!*may) {
      return Keep(*save, absl::StrCat("complete, but ", save->file,
                                      " has changed since; remove one of the two"));
    }
    // The manifest's rename may not be durable yet.
    HOLDFAST_RETURN_IF_ERROR(directory::SyncDirectory(parent_, absl::StrCat("of ", save->file)));
    if (sys::Sys().renameat2(parent_, name.c_str(), parent_, save->file.c_str(), 0) != 0)
      return Keep(*save, base::ErrnoStatus("rename", name, errno).message());
    save->has_temporary = false;
    report_->promoted.push_back(save->file);
    return directory::SyncDirectory(parent_, absl::StrCat("of ", save->file));
  }

  /// True when a save that began later has committed.
  bool IsOvertaken(const FileSave& save, const format::Manifest& manifest) const {
    return std::any_of(saves_.begin(), saves_.end(), [&](const FileSave& other) {
      return other.file == save.file && other.attempt != save.attempt && other.committed() &&
             std::find(manifest.replaces.begin(), manifest.replaces.end(), other.attempt) ==
                 manifest.replaces.end();
    });
  }

  /// True for a leftover of a committed save: a partial manifest, or the manifest of a removed or
  /// replaced file.
  bool IsSuperfluous(const FileSave& save) const {
    if (!save.has_manifest) return save.has_manifest_temporary;
    const auto entry = Entry(save.file);
    if (entry.ok() && entry->kind == EntryKind::kNothing) return true;
    return std::any_of(saves_.begin(), saves_.end(), [&](const FileSave& other) {
      if (other.file != save.file || other.attempt == save.attempt || !other.committed())
        return false;
      const auto manifest = directory::ReadManifest(parent_, other);
      return manifest.ok() && std::find(manifest->replaces.begin(), manifest->replaces.end(),
                                        save.attempt) != manifest->replaces.end();
    });
  }

  absl::StatusOr<directory::Entry> Entry(const std::string& name) const {
    return directory::Look(parent_, name, /*follow_symlink=*/false);
  }

  bool IsOld(const std::string& name) const {
    const auto entry = Entry(name);
    if (!entry.ok()) return false;
    const absl::Time changed = absl::UnixEpoch() + absl::Nanoseconds(entry->modified_ns);
    return directory::TimeOnFileSystem(parent_) - changed >= options_.age_without_locks;
  }

  absl::Status Keep(const FileSave& save, absl::string_view why) {
    report_->kept_incomplete.push_back(
        absl::StrCat(NameOf(save, CompanionKind::kTemporary), ": ", why));
    return absl::OkStatus();
  }

  void Remove(const FileSave& save) {
    if (!options_.clean_up) return;
    const absl::Status removed = directory::RemoveCompanions(parent_, save);
    if (!removed.ok()) return (void)Keep(save, removed.message());
    report_->removed.push_back(
        NameOf(save, save.has_temporary ? CompanionKind::kTemporary : CompanionKind::kManifest));
  }

  const int parent_;
  const directory::FileSystem file_system_;
  const RecoveryOptions options_;
  RecoveryReport* const report_;
  std::vector<FileSave> saves_;
};

}  // namespace

absl::Status AwaitSingleFiles(int parent, const std::string& path, absl::Time deadline) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(parent, path));
  for (const FileSave& save : directory::FileSavesAmong(names)) {
    if (!save.has_temporary) continue;
    while (base::Now() < deadline) {
      // Opened anew each time: its save may have ended, and a held lock would make the next save
      // take another file.
      const auto fd = directory::OpenFile(parent, NameOf(save, CompanionKind::kTemporary),
                                          /*follow_symlink=*/false);
      if (!fd.ok() || !IsLocked(fd->get())) break;
      directory::Pause(kWriterPoll);
    }
  }
  return absl::OkStatus();
}

absl::Status SettleSingleFiles(int parent, const std::string& path,
                               const directory::FileSystem& file_system,
                               const RecoveryOptions& options, RecoveryReport* report) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(parent, path));
  return Settling(parent, file_system, options, report).Run(directory::FileSavesAmong(names));
}

}  // namespace recovery

absl::StatusOr<std::vector<std::string>> FileManifests(const std::string& directory,
                                                       const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(directory));
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(fd.get(), directory));
  std::vector<std::string> manifests;
  for (const directory::FileSave& save : directory::FileSavesAmong(names)) {
    if (save.file == name && save.has_manifest)
      manifests.push_back(recovery::NameOf(save, format::CompanionKind::kManifest));
  }
  return manifests;
}

absl::Status RemoveFile(const std::string& directory, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(directory));
  // Saves replace files under the same lock.
  HOLDFAST_RETURN_IF_ERROR(directory::TakeTurn(fd.get(), directory, absl::Minutes(10)));
  HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry entry,
                            directory::Look(fd.get(), name, /*follow_symlink=*/false));
  if (entry.kind == directory::EntryKind::kDirectory) {
    return absl::FailedPreconditionError(
        absl::StrCat("remove ", directory, "/", name, ": it is a directory"));
  }
  if (sys::Sys().unlinkat(fd.get(), name.c_str(), 0) != 0 && errno != ENOENT)
    return base::ErrnoStatus("remove", absl::StrCat(directory, "/", name), errno);
  // The file first: a file without its manifest could no longer be proven.
  HOLDFAST_RETURN_IF_ERROR(directory::SyncDirectory(fd.get(), directory));
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(fd.get(), directory));
  for (const directory::FileSave& save : directory::FileSavesAmong(names)) {
    // A temporary file belongs to a save under way.
    if (save.file == name && save.committed())
      HOLDFAST_RETURN_IF_ERROR(directory::RemoveCompanions(fd.get(), save));
  }
  return absl::OkStatus();
}

}  // namespace holdfast
