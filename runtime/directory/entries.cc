#include "runtime/directory/entries.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::directory {
namespace {

int64_t NsOf(const struct timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

Entry EntryOf(const struct stat& status) {
  Entry entry;
  entry.bytes = static_cast<uint64_t>(status.st_size);
  entry.modified_ns = NsOf(status.st_mtim);
  entry.inode = status.st_ino;
  entry.changed_ns = NsOf(status.st_ctim);
  if (S_ISREG(status.st_mode)) {
    entry.kind = EntryKind::kFile;
  } else if (S_ISDIR(status.st_mode)) {
    entry.kind = EntryKind::kDirectory;
  } else if (S_ISLNK(status.st_mode)) {
    entry.kind = EntryKind::kSymlink;
  } else {
    entry.kind = EntryKind::kOther;
  }
  return entry;
}

int OpenRetrying(int parent, const char* name, int flags) {
  return sys::Uninterrupted(
      [&] { return sys::OpenOwned(parent, name, flags | O_RDONLY | O_CLOEXEC, 0); });
}

/// The part of the kernel's linux_dirent64 before the name: getdents64(2).
struct RawEntry {
  uint64_t inode;
  int64_t next;
  uint16_t bytes;
  uint8_t type;
};
constexpr size_t kNameOffset = offsetof(RawEntry, type) + 1;

bool IsDirectory(int directory, const char* name, uint8_t type) {
  if (type != DT_UNKNOWN) return type == DT_DIR;
  struct stat found = {};
  return sys::Sys().fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISDIR(found.st_mode);
}

/// Calls `add` with the name and the DT_ type of each entry but "." and "..".
absl::Status ForEachEntry(int directory, absl::string_view path,
                          absl::FunctionRef<void(int fd, const char* name, uint8_t type)> add) {
  // A separate open file description: getdents64 moves the offset, and `directory` may be shared
  // with another process.
  base::UniqueFd fd(OpenRetrying(directory, ".", O_DIRECTORY));
  if (!fd.valid()) return base::ErrnoStatus("open", path, errno);
  std::vector<char> buffer(64 * 1024);
  size_t entries = 0;
  while (true) {
    const ssize_t filled = sys::Uninterrupted(
        [&] { return sys::Sys().getdents64(fd.get(), buffer.data(), buffer.size()); });
    if (filled < 0) return base::ErrnoStatus("list", path, errno);
    if (filled == 0) return absl::OkStatus();
    for (size_t at = 0; at + kNameOffset < static_cast<size_t>(filled);) {
      RawEntry raw;
      memcpy(&raw, buffer.data() + at, sizeof(raw));
      const char* name = buffer.data() + at + kNameOffset;
      at += raw.bytes;
      if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
      if (++entries > kEntriesMax) {
        return absl::ResourceExhaustedError(
            absl::StrCat("list ", path, ": more than ", kEntriesMax, " entries"));
      }
      add(fd.get(), name, raw.type);
    }
  }
}

}  // namespace

PathParts SplitPath(const std::string& path) {
  const size_t last = path.find_last_not_of('/');
  if (last == std::string::npos) return {path.empty() ? "." : "/", "."};
  const std::string trimmed = path.substr(0, last + 1);
  const size_t slash = trimmed.find_last_of('/');
  if (slash == std::string::npos) return {".", trimmed};
  return {slash == 0 ? "/" : trimmed.substr(0, slash), trimmed.substr(slash + 1)};
}

absl::StatusOr<base::UniqueFd> OpenDirectory(const std::string& path) {
  const int fd = OpenRetrying(AT_FDCWD, path.c_str(), O_DIRECTORY);
  if (fd < 0) return base::ErrnoStatus("open", path, errno);
  return base::UniqueFd(fd);
}

absl::StatusOr<base::UniqueFd> OpenDirectory(int parent, const std::string& name) {
  const int fd = OpenRetrying(parent, name.c_str(), O_DIRECTORY | O_NOFOLLOW);
  if (fd < 0) return base::ErrnoStatus("open directory", name, errno);
  return base::UniqueFd(fd);
}

absl::StatusOr<base::UniqueFd> MakeDirectory(int parent, const std::string& name) {
  constexpr mode_t kMode = 0777;  // less the umask, as mkdir(1)
  if (sys::Sys().mkdirat(parent, name.c_str(), kMode) != 0 && errno != EEXIST) {
    const absl::Status failed = base::ErrnoStatus("make directory", name, errno);
    // The parent was removed: a retry, as after a kNotFound of the open, could not help.
    return absl::IsNotFound(failed) ? absl::FailedPreconditionError(failed.message()) : failed;
  }
  return OpenDirectory(parent, name);
}

absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(int directory, absl::string_view path) {
  std::vector<DirectoryEntry> entries;
  HOLDFAST_RETURN_IF_ERROR(
      ForEachEntry(directory, path, [&entries](int fd, const char* name, uint8_t type) {
        entries.push_back({.name = name, .is_directory = IsDirectory(fd, name, type)});
      }));
  std::sort(entries.begin(), entries.end(),
            [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
  return entries;
}

absl::StatusOr<std::vector<std::string>> ListNames(int directory, absl::string_view path) {
  std::vector<std::string> names;
  HOLDFAST_RETURN_IF_ERROR(ForEachEntry(
      directory, path,
      [&names](int /*fd*/, const char* name, uint8_t /*type*/) { names.push_back(name); }));
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<Entry> Look(int directory, const std::string& name, bool follow_symlink) {
  struct stat status = {};
  const int flags = follow_symlink ? 0 : AT_SYMLINK_NOFOLLOW;
  if (sys::Sys().fstatat(directory, name.c_str(), &status, flags) != 0) {
    if (errno == ENOENT) return Entry{};
    return base::ErrnoStatus("stat", name, errno);
  }
  return EntryOf(status);
}

absl::StatusOr<std::string> ReadRange(int file, const std::string& name, uint64_t begin,
                                      uint64_t bytes) {
  std::string out(bytes, '\0');
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t got = sys::Uninterrupted([&] {
      return sys::Sys().pread(file, out.data() + done, bytes - done,
                              static_cast<off_t>(begin + done));
    });
    if (got < 0) return base::ErrnoStatus("read", name, errno);
    if (got == 0) {
      return absl::DataLossError(absl::StrCat("read ", name, " @ ", begin + done,
                                              ": the file ends here, ", bytes - done,
                                              " bytes too early"));
    }
    done += static_cast<uint64_t>(got);
  }
  return out;
}

absl::StatusOr<base::UniqueFd> OpenFile(int directory, const std::string& name,
                                        bool follow_symlink) {
  // O_NONBLOCK: opening a FIFO would wait for a writer. The flag has no effect on a regular file.
  const int flags = O_NONBLOCK | (follow_symlink ? 0 : O_NOFOLLOW);
  base::UniqueFd fd(OpenRetrying(directory, name.c_str(), flags));
  if (!fd.valid()) return base::ErrnoStatus("open", name, errno);
  struct stat status = {};
  if (sys::Sys().fstat(fd.get(), &status) != 0) return base::ErrnoStatus("stat", name, errno);
  if (!S_ISREG(status.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat("open ", name, ": not a regular file"));
  }
  return fd;
}

absl::StatusOr<std::string> ReadWholeFile(int directory, const std::string& name,
                                          uint64_t bytes_max) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, OpenFile(directory, name, false));
  struct stat status = {};
  if (sys::Sys().fstat(fd.get(), &status) != 0) return base::ErrnoStatus("stat", name, errno);
  const uint64_t bytes = static_cast<uint64_t>(status.st_size);
  if (bytes > bytes_max) {
    return absl::DataLossError(
        absl::StrCat("read ", name, ": ", bytes, " bytes, more than the limit of ", bytes_max));
  }
  return ReadRange(fd.get(), name, 0, bytes);
}

absl::Status SyncDirectory(int directory, absl::string_view name) {
  if (sys::Sys().fsync(directory) == 0) return absl::OkStatus();
  // fsync(2): EROFS or EINVAL is a file that "does not support synchronization". A read-only mount
  // has no pending write, and CIFS has no better call.
  if (errno == EINVAL || errno == EROFS) return absl::OkStatus();
  return base::ErrnoStatus("fsync directory", name, errno);
}

bool NameRefersTo(int parent, const std::string& name, int fd) {
  struct stat by_name = {};
  struct stat by_fd = {};
  return sys::Sys().fstatat(parent, name.c_str(), &by_name, AT_SYMLINK_NOFOLLOW) == 0 &&
         sys::Sys().fstat(fd, &by_fd) == 0 && by_name.st_dev == by_fd.st_dev &&
         by_name.st_ino == by_fd.st_ino;
}

absl::StatusOr<Identity> IdentityOf(int fd, absl::string_view name) {
  struct statx found = {};
  if (sys::Sys().statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &found) != 0) {
    return base::ErrnoStatus("statx", name, errno);
  }
  const bool has_birth =
      (found.stx_mask & STATX_BTIME) != 0 && !base::Planted(base::Bug::kInodeIsIdentity);
  const int64_t born_ns =
      int64_t{found.stx_btime.tv_sec} * 1'000'000'000 + int64_t{found.stx_btime.tv_nsec};
  return Identity{.inode = found.stx_ino, .born_ns = has_birth ? born_ns : 0};
}

namespace {

/// Returns the path behind a link of /proc/self; empty for a missing link or too long a path.
std::string PathBehind(const std::string& link) {
  char path[PATH_MAX];
  const ssize_t length = sys::Sys().readlinkat(AT_FDCWD, link.c_str(), path, sizeof(path));
  if (length <= 0 || length >= static_cast<ssize_t>(sizeof(path))) return "";
  return std::string(path, static_cast<size_t>(length));
}

}  // namespace

std::string NameOf(int directory, const std::string& path) {
  const std::string own = PathBehind(absl::StrCat("/proc/self/fd/", directory));
  // Of a directory that was removed the kernel says so behind the name.
  return SplitPath(own.empty() || absl::EndsWith(own, " (deleted)") ? path : own).name;
}

std::string AbsolutePath(const std::string& path) {
  std::filesystem::path out(path);
  // Without a working directory the path stays relative.
  if (out.is_relative()) out = std::filesystem::path(PathBehind("/proc/self/cwd")) / out;
  return out.lexically_normal().string();
}

void Pause(absl::Duration time) {
  const struct timespec request = absl::ToTimespec(time);
  sys::Sys().nanosleep(&request, nullptr);
}

}  // namespace holdfast::directory
