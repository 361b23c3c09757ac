// Directories and small files by fd: open, look, list, read, sync. All calls go through the table
// of system calls.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_ENTRIES_H_
#define HOLDFAST_RUNTIME_DIRECTORY_ENTRIES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

/// The kind of entry at a name.
enum class EntryKind { kNothing, kFile, kDirectory, kSymlink, kOther };
struct Entry {
  EntryKind kind = EntryKind::kNothing;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
  uint64_t inode = 0;
  int64_t changed_ns = 0;  ///< Of the inode; a rename counts.

  /// True when a name stands for the same file as before, unchanged.
  bool operator==(const Entry&) const = default;
};

/// Splits "/a/b/c", "/a/b/c/" into "/a/b" and "c"; "c" into "." and "c".
struct PathParts {
  std::string directory;
  std::string name;
};
PathParts SplitPath(const std::string& path);

/// Opens a directory and follows symbolic links.
/// \error as open(2): kNotFound, kFailedPrecondition for another kind of entry, ...
absl::StatusOr<base::UniqueFd> OpenDirectory(const std::string& path);

/// Opens a directory for reading, without following a symbolic link in the last component.
/// `parent` may be AT_FDCWD.
absl::StatusOr<base::UniqueFd> OpenDirectory(int parent, const std::string& name);

/// Makes a directory, or finds an existing one, and opens it.
/// \error kNotFound when the directory was removed between mkdir and open, kFailedPrecondition when
/// `parent` was removed; errors of mkdir and open.
absl::StatusOr<base::UniqueFd> MakeDirectory(int parent, const std::string& name);

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;  ///< Read from the inode when the listing lacks the type.
};

/// Lists all entries but "." and "..", sorted by name. `path` is for messages.
/// \error kResourceExhausted beyond `kEntriesMax`.
absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(int directory,
                                                          absl::string_view path = "directory");
inline constexpr size_t kEntriesMax = 4'000'000;

/// As ListDirectory, names only.
absl::StatusOr<std::vector<std::string>> ListNames(int directory, absl::string_view path);

/// Returns the entry at `name`. A missing entry is kNothing, not an error.
absl::StatusOr<Entry> Look(int directory, const std::string& name, bool follow_symlink);

/// Reads bytes [begin, begin + bytes) of a regular file, completely.
/// \error kDataLoss when the file is shorter.
absl::StatusOr<std::string> ReadRange(int file, const std::string& name, uint64_t begin,
                                      uint64_t bytes);

/// Opens a regular file for reading; never blocks on a FIFO.
absl::StatusOr<base::UniqueFd> OpenFile(int directory, const std::string& name,
                                        bool follow_symlink);

/// Reads a whole file of at most `bytes_max`; follows no symbolic link.
absl::StatusOr<std::string> ReadWholeFile(int directory, const std::string& name,
                                          uint64_t bytes_max);

/// fsync(2) of a directory: its entries survive power loss.
absl::Status SyncDirectory(int directory, absl::string_view name);

/// True when `name` below `parent` is the inode that `fd` has open. A recovery may rename a
/// directory between opening and locking.
bool NameRefersTo(int parent, const std::string& name, int fd);

/// Tells a directory from every other, past ones too: an inode number alone is soon used again.
struct Identity {
  uint64_t inode = 0;
  int64_t born_ns = 0;  ///< 0 where the file system records no time of birth.
  bool operator==(const Identity&) const = default;
};
/// \error of statx(2).
absl::StatusOr<Identity> IdentityOf(int fd, absl::string_view name);

/// Returns the last component of an open directory's own path, which "." and links do not show.
/// Without an answer of the kernel returns the last component of `path`.
std::string NameOf(int directory, const std::string& path);

/// Returns the path from the root, for messages and reports. The path need not exist.
std::string AbsolutePath(const std::string& path);

/// Sleeps, through the table of system calls.
void Pause(absl::Duration time);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_ENTRIES_H_
