#include "runtime/load/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/sys/system.h"

namespace holdfast::load {
namespace {

Entry EntryOf(const struct stat& status) {
  Entry entry;
  entry.bytes = static_cast<uint64_t>(status.st_size);
  entry.modified_ns = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
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

int OpenRetrying(int directory, const char* name, int flags) {
  int fd = -1;
  do {
    fd = sys::Sys().openat(directory, name, flags | O_CLOEXEC, 0);
  } while (fd < 0 && errno == EINTR);
  return fd;
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
  const int fd = OpenRetrying(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (fd < 0) return base::ErrnoStatus("open", path, errno);
  return base::UniqueFd(fd);
}

absl::StatusOr<std::vector<std::string>> ListDirectory(int directory, const std::string& path) {
  // An fd of its own: the caller's may have been listed before, and its position is shared.
  base::UniqueFd fd(OpenRetrying(directory, ".", O_RDONLY | O_DIRECTORY));
  if (!fd.valid()) return base::ErrnoStatus("open", path, errno);
  std::vector<std::string> names;
  alignas(8) char buffer[32 * 1024];
  while (true) {
    const ssize_t bytes = sys::Sys().getdents64(fd.get(), buffer, sizeof(buffer));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return base::ErrnoStatus("list", path, errno);
    if (bytes == 0) break;
    for (ssize_t at = 0; at < bytes;) {
      const auto* entry = reinterpret_cast<const struct dirent64*>(buffer + at);
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
      at += entry->d_reclen;
    }
    if (names.size() > kEntriesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("list ", path, ": more than ", kEntriesMax, " entries"));
    }
  }
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
    const ssize_t got =
        sys::Sys().pread(file, out.data() + done, bytes - done, static_cast<off_t>(begin + done));
    if (got < 0 && errno == EINTR) continue;
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
  // O_NONBLOCK: opening a FIFO would wait for a writer; it means nothing to a regular file.
  const int flags = O_RDONLY | O_NONBLOCK | (follow_symlink ? 0 : O_NOFOLLOW);
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

}  // namespace holdfast::load
