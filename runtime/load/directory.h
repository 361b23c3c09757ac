// Looking into a directory that may hold a checkpoint: entries, sizes, and small files whole.
#ifndef HOLDFAST_RUNTIME_LOAD_DIRECTORY_H_
#define HOLDFAST_RUNTIME_LOAD_DIRECTORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::load {

/// What stands at a name.
enum class EntryKind { kNothing, kFile, kDirectory, kSymlink, kOther };
struct Entry {
  EntryKind kind = EntryKind::kNothing;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
};

/// Splits "/a/b/c", "/a/b/c/" into "/a/b" and "c"; "c" into "." and "c".
struct PathParts {
  std::string directory;
  std::string name;
};
PathParts SplitPath(const std::string& path);

/// \error as open(2): kNotFound, kFailedPrecondition for what is no directory, ...
absl::StatusOr<base::UniqueFd> OpenDirectory(const std::string& path);

/// Names in a directory, sorted, without "." and "..".
/// \error kResourceExhausted beyond `kEntriesMax`.
absl::StatusOr<std::vector<std::string>> ListDirectory(int directory, const std::string& path);
inline constexpr size_t kEntriesMax = 4'000'000;

/// What stands at `name`. Nothing there is not an error.
absl::StatusOr<Entry> Look(int directory, const std::string& name, bool follow_symlink);

/// Bytes [begin, begin + bytes) of a regular file, all of it or an error.
/// \error kDataLoss when the file ends before.
absl::StatusOr<std::string> ReadRange(int file, const std::string& name, uint64_t begin,
                                      uint64_t bytes);

/// Opens a regular file for reading; never blocks on a FIFO.
absl::StatusOr<base::UniqueFd> OpenFile(int directory, const std::string& name,
                                        bool follow_symlink);

/// A whole file of at most `bytes_max`, no symlink followed.
absl::StatusOr<std::string> ReadWholeFile(int directory, const std::string& name,
                                          uint64_t bytes_max);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_DIRECTORY_H_
