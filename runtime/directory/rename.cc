#include "runtime/directory/rename.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/sys/errno_code.h"
#include "runtime/sys/system.h"

namespace holdfast::directory {
namespace {

constexpr int kNamesMax = 1000;

int Rename(int parent, const std::string& from, const std::string& to, unsigned flags) {
  return sys::Sys().renameat2(parent, from.c_str(), parent, to.c_str(), flags) == 0 ? 0 : errno;
}

}  // namespace

absl::Status RenameNoReplace(int parent, const std::string& from, const std::string& to) {
  int failed = Rename(parent, from, to, RENAME_NOREPLACE);
  if (sys::LacksRenameFlag(failed)) {
    // The file system lacks the flag. A plain rename refuses a directory with entries, and an empty
    // directory is no loss. The check before the rename refuses files of that name.
    struct stat found = {};
    if (sys::Sys().fstatat(parent, to.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0) {
      failed = EEXIST;
    } else {
      failed = errno == ENOENT ? Rename(parent, from, to, 0) : errno;
    }
    if (failed == ENOTEMPTY) failed = EEXIST;
  }
  if (failed == 0) return absl::OkStatus();
  return base::ErrnoStatus("rename", absl::StrCat(from, " to ", to), failed);
}

absl::StatusOr<std::string> RenameToFree(int parent, const std::string& from,
                                         format::DirectoryName wanted) {
  absl::Status status;
  for (int i = 0; i < kNamesMax; ++i, ++wanted.attempt.low) {
    std::string name = format::FormatDirectoryName(wanted);
    status = RenameNoReplace(parent, from, name);
    if (status.ok()) return name;
    if (!absl::IsAlreadyExists(status)) return status;
  }
  return status;
}

}  // namespace holdfast::directory
