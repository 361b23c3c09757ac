#include "runtime/directory/replacement.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/exchange.h"
#include "runtime/worker/job_run.h"

namespace holdfast::directory {
namespace {

constexpr int kReplacementLooksMax = 100;

absl::StatusOr<worker::Contents> LookInside(int directory, const std::string& name) {
  std::vector<char> buffer(worker::kDirectoryBufferBytes);
  const worker::Contents contents = worker::LookInto(directory, buffer.data());
  if (contents.error_number != 0) return base::ErrnoStatus("read", name, contents.error_number);
  return contents;
}

struct Standing {
  base::UniqueFd directory;
  worker::Contents contents;
};

/// Looks into the directory of a name. A save that replaces this directory removes the files during
/// the look, so a look counts only if the name refers to the directory afterwards.
/// \error kNotFound when nothing has the name.
absl::StatusOr<Standing> LookAt(int parent, const std::string& name) {
  for (int look = 0; look < kReplacementLooksMax; ++look) {
    HOLDFAST_ASSIGN_OR_RETURN(base::UniqueFd directory, OpenDirectory(parent, name));
    const auto contents = LookInside(directory.get(), name);
    if (absl::IsNotFound(contents.status()) || !NameRefersTo(parent, name, directory.get()))
      continue;
    if (!contents.ok()) return contents.status();
    return Standing{.directory = std::move(directory), .contents = *contents};
  }
  return absl::UnavailableError(absl::StrCat("read ", name, ": its files are being removed"));
}

absl::Status RefuseLink(int parent, const std::string& name) {
  char target[PATH_MAX];
  const ssize_t bytes = sys::Sys().readlinkat(parent, name.c_str(), target, sizeof(target));
  return absl::FailedPreconditionError(
      absl::StrCat("it is a symbolic link to ",
                   absl::string_view(target, bytes < 0 ? 0 : static_cast<size_t>(bytes)),
                   ", and a save replaces no link; save under the path that it leads to, or remove "
                   "the link"));
}

}  // namespace

absl::Status CheckTarget(int parent, const std::string& name, const Wanted& wanted) {
  struct stat found = {};
  if (sys::Sys().fstatat(parent, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
    return errno == ENOENT ? absl::OkStatus() : base::ErrnoStatus("look at", name, errno);
  }
  const absl::Status exists = absl::AlreadyExistsError(
      "it exists already; choose another name, remove it, or ask to replace it");
  if (!S_ISDIR(found.st_mode) && !wanted.replace) return exists;
  if (S_ISLNK(found.st_mode)) return RefuseLink(parent, name);
  if (!S_ISDIR(found.st_mode)) {
    return absl::FailedPreconditionError(
        "it is a file, not a checkpoint; remove it, or save under "
        "another name");
  }
  if (!wanted.replace) {
    const auto directory = OpenDirectory(parent, name);
    if (absl::IsNotFound(directory.status())) return absl::OkStatus();
    if (!directory.ok()) return directory.status();
    HOLDFAST_ASSIGN_OR_RETURN(const auto entries, ListDirectory(directory->get()));
    return entries.empty() ? absl::OkStatus() : exists;
  }
  if (!wanted.decides) return absl::OkStatus();
  const auto standing = LookAt(parent, name);
  if (absl::IsNotFound(standing.status())) return absl::OkStatus();
  if (!standing.ok()) return standing.status();
  if (standing->contents.foreign[0] == '\0') return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("replace it: it holds ", standing->contents.foreign,
                   ", which is no part of a checkpoint; nothing was removed; move the entry "
                   "elsewhere, or save under another name"));
}

absl::Status RefuseForeign(const std::string& name, const char* entry) {
  return absl::FailedPreconditionError(absl::StrCat("remove ", name, ": it holds ", entry,
                                                    ", which is no part of a checkpoint and was "
                                                    "kept; move the entry elsewhere"));
}

absl::StatusOr<base::UniqueFd> LockRemovable(int directory, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const worker::Contents contents, LookInside(directory, name));
  if (!contents.whole) {
    return absl::FailedPreconditionError(
        absl::StrCat("remove ", name,
                     ": it lacks manifests, so that nothing proves whose its files "
                     "are; it was kept under its name; remove the directory yourself"));
  }
  if (worker::MustKeep(contents, name.c_str())) return RefuseForeign(name, contents.foreign);
  int lock = -1;
  const bool locked = worker::LockManifest(directory, contents.manifest, &lock);
  base::UniqueFd held(lock);
  if (locked) return held;
  return absl::AbortedError(absl::StrCat("remove ", name, ": a save is replacing it"));
}

absl::StatusOr<std::vector<AttemptId>> OlderAttempts(int parent, const std::string& name) {
  std::vector<AttemptId> older;
  HOLDFAST_ASSIGN_OR_RETURN(const auto entries, ListDirectory(parent));
  for (const DirectoryEntry& entry : entries) {
    const format::DirectoryName parsed = format::ParseDirectoryName(entry.name);
    if (parsed.kind == format::DirectoryKind::kPartial && parsed.checkpoint == name)
      older.push_back(parsed.attempt);
  }
  // After the list: an attempt that commits in between has its final name here.
  const auto standing = LookAt(parent, name);
  if (absl::IsNotFound(standing.status())) return older;
  if (!standing.ok()) return standing.status();
  older.push_back(standing->contents.attempt);
  return older;
}

absl::Status FinishReplace(int parent, const std::string& partial, const std::string& name,
                           const std::vector<AttemptId>& replaces) {
  if (const auto opened = OpenDirectory(parent, name); !opened.ok())
    return absl::AlreadyExistsError(opened.status().message());
  HOLDFAST_ASSIGN_OR_RETURN(const Standing standing, LookAt(parent, name));
  const worker::Contents& contents = standing.contents;
  const int directory = standing.directory.get();
  const bool proven =
      contents.attempt != AttemptId{} &&
      std::find(replaces.begin(), replaces.end(), contents.attempt) != replaces.end();
  if (!proven && !base::Planted(base::Bug::kReplaceUnproven)) {
    return absl::AlreadyExistsError("it is no checkpoint that the save was to replace");
  }
  if (contents.foreign[0] != '\0') {
    return absl::FailedPreconditionError(
        absl::StrCat("it holds ", contents.foreign, ", which is no part of a checkpoint"));
  }
  int lock = -1;
  const bool locked = worker::LockManifest(directory, contents.manifest, &lock);
  const base::UniqueFd held(lock);
  if (!locked || !NameRefersTo(parent, name, directory)) {
    return absl::UnavailableError("another save is replacing it");
  }
  char old[kNameBytes];
  const int error = worker::Exchange(parent, partial.c_str(), name.c_str(), contents.attempt, old);
  return error == 0 ? absl::OkStatus() : base::ErrnoStatus("replace", name, error);
}

}  // namespace holdfast::directory
