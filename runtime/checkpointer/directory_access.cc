#include "runtime/checkpointer/directory_access.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/sys/system.h"

namespace holdfast::checkpointer {
namespace {

constexpr size_t kEntriesMax = 1'000'000;

int OpenRetrying(int parent, const char* name, int flags) {
  int fd = -1;
  do {
    fd = sys::Sys().openat(parent, name, flags | O_RDONLY | O_CLOEXEC, 0);
  } while (fd < 0 && errno == EINTR);
  return fd;
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

}  // namespace

absl::StatusOr<base::UniqueFd> OpenDirectory(int parent, const std::string& name) {
  const int fd = OpenRetrying(parent, name.c_str(), O_DIRECTORY | O_NOFOLLOW);
  if (fd < 0) return base::ErrnoStatus("open directory", name, errno);
  return base::UniqueFd(fd);
}

absl::StatusOr<base::UniqueFd> MakeDirectory(int parent, const std::string& name) {
  constexpr mode_t kMode = 0777;  // less the umask, as mkdir(1)
  if (sys::Sys().mkdirat(parent, name.c_str(), kMode) != 0 && errno != EEXIST) {
    const absl::Status failed = base::ErrnoStatus("make directory", name, errno);
    // The parent was removed: retrying, as after a kNotFound of the open, could not help.
    return absl::IsNotFound(failed) ? absl::FailedPreconditionError(failed.message()) : failed;
  }
  return OpenDirectory(parent, name);
}

absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(int directory) {
  // An open file description of its own: getdents64 moves the offset, and `directory` may be shared
  // with another process.
  base::UniqueFd fd(OpenRetrying(directory, ".", O_DIRECTORY));
  if (!fd.valid()) return base::ErrnoStatus("open", "directory to list it", errno);
  std::vector<DirectoryEntry> entries;
  std::vector<char> buffer(64 * 1024);
  while (true) {
    const ssize_t filled = sys::Sys().getdents64(fd.get(), buffer.data(), buffer.size());
    if (filled < 0 && errno == EINTR) continue;
    if (filled < 0) return base::ErrnoStatus("list", "directory", errno);
    if (filled == 0) break;
    for (size_t at = 0; at + kNameOffset < static_cast<size_t>(filled);) {
      RawEntry raw;
      memcpy(&raw, buffer.data() + at, sizeof(raw));
      const char* name = buffer.data() + at + kNameOffset;
      if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
        if (entries.size() == kEntriesMax) {
          return absl::ResourceExhaustedError("list directory: more than a million entries");
        }
        entries.push_back({.name = name, .is_directory = IsDirectory(fd.get(), name, raw.type)});
      }
      at += raw.bytes;
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
  return entries;
}

absl::StatusOr<std::string> ReadFile(int directory, const std::string& name, uint64_t bytes_max) {
  // O_NONBLOCK: a FIFO of that name must not block the caller; it means nothing for files.
  base::UniqueFd fd(OpenRetrying(directory, name.c_str(), O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid()) return base::ErrnoStatus("open", name, errno);
  struct stat found = {};
  if (sys::Sys().fstat(fd.get(), &found) != 0) return base::ErrnoStatus("stat", name, errno);
  if (!S_ISREG(found.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat("read ", name, ": not a regular file"));
  }
  if (static_cast<uint64_t>(found.st_size) > bytes_max) {
    return absl::FailedPreconditionError(
        absl::StrCat("read ", name, ": ", found.st_size, " bytes are more than the limit"));
  }
  std::string text(static_cast<size_t>(found.st_size), '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = sys::Sys().read(fd.get(), text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return base::ErrnoStatus("read", name, errno);
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  text.resize(filled);
  return text;
}

absl::Status SyncDirectory(int directory, absl::string_view name) {
  if (sys::Sys().fsync(directory) == 0) return absl::OkStatus();
  // fsync(2): EROFS or EINVAL is a file that "does not support synchronization". There is nothing
  // to wait for then (a read-only mount), or nothing better to ask for (CIFS).
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

void Pause(absl::Duration time) {
  const struct timespec request = absl::ToTimespec(time);
  sys::Sys().nanosleep(&request, nullptr);
}

}  // namespace holdfast::checkpointer
