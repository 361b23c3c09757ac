#include "runtime/writer/worker_program.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/base/status.h"
#include "runtime/sys/system.h"

namespace holdfast::writer {
namespace {

// Ok, or why `path` cannot be started.
absl::Status CheckExecutable(const std::string& path) {
  struct stat info = {};
  if (sys::Sys().fstatat(AT_FDCWD, path.c_str(), &info, 0) != 0) {
    return base::ErrnoStatus("find worker program", path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::NotFoundError(absl::StrCat("find worker program ", path, ": not a file"));
  }
  // The mode rather than access(2): for root, access calls any file with one executable bit
  // executable.
  if ((info.st_mode & (S_IXUSR | S_IXGRP | S_IXOTH)) == 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("find worker program ", path, ": not executable"));
  }
  return absl::OkStatus();
}

// Returns the path that the user set, or an error that names the setting.
absl::StatusOr<std::string> AsAsked(const std::string& path, absl::string_view where) {
  const absl::Status status = CheckExecutable(path);
  if (status.ok()) return path;
  return absl::NotFoundError(absl::StrCat(status.message(), " (from ", where, ")"));
}

// Directory of the running executable, empty if the kernel does not say.
std::string ExecutableDirectory() {
  char buffer[PATH_MAX];
  const ssize_t length = sys::Sys().readlinkat(AT_FDCWD, "/proc/self/exe", buffer, sizeof(buffer));
  if (length <= 0 || length == static_cast<ssize_t>(sizeof(buffer))) return "";
  const std::string path(buffer, static_cast<size_t>(length));
  return path.substr(0, path.rfind('/'));
}

}  // namespace

absl::StatusOr<std::string> FindWorkerProgram(const std::string& option) {
  if (!option.empty()) return AsAsked(option, "CheckpointerOptions::worker_program");
  if (const char* const variable = std::getenv("HOLDFAST_WORKER");
      variable != nullptr && *variable != '\0') {
    return AsAsked(variable, "$HOLDFAST_WORKER");
  }

  std::vector<std::string> candidates;
  if (const std::string directory = ExecutableDirectory(); !directory.empty()) {
    candidates.push_back(absl::StrCat(directory, "/holdfast-worker"));
    candidates.push_back(absl::StrCat(directory, "/../libexec/holdfast/holdfast-worker"));
  }
  candidates.push_back(HOLDFAST_INSTALLED_WORKER);
  std::vector<std::string> tried;
  for (const std::string& path : candidates) {
    const absl::Status status = CheckExecutable(path);
    if (status.ok()) return path;
    tried.push_back(status.code() == absl::StatusCode::kNotFound
                        ? path
                        : absl::StrCat(path, " (", status.message(), ")"));
  }
  return absl::NotFoundError(
      absl::StrCat("find worker program: no holdfast-worker at ", absl::StrJoin(tried, ", "),
                   "; set CheckpointerOptions::worker_program or $HOLDFAST_WORKER to its path"));
}

}  // namespace holdfast::writer
