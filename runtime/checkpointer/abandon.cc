#include "runtime/checkpointer/abandon.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "holdfast/recovery.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/checkpointer/directory_access.h"
#include "runtime/checkpointer/options.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/job.h"
#include "runtime/sys/system.h"

namespace holdfast {
namespace checkpointer {

absl::Status LeaveAbortedMark(int parent, const std::string& partial) {
  constexpr mode_t kMode = 0666;  // the umask takes its part
  // The first rank that comes makes the directory, also for a mark.
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd directory, MakeDirectory(parent, partial));
  const base::UniqueFd mark(sys::Sys().openat(directory.get(), layout::kAbortedName,
                                              O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, kMode));
  if (!mark.valid()) {
    return base::ErrnoStatus("make", absl::StrCat(partial, "/", layout::kAbortedName), errno);
  }
  return absl::OkStatus();
}

}  // namespace checkpointer

absl::Status AbandonSave(const std::string& directory, const std::string& name,
                         const AttemptId& attempt) {
  HOLDFAST_RETURN_IF_ERROR(checkpointer::ValidateName(name));
  const base::UniqueFd parent(
      sys::Sys().openat(AT_FDCWD, directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!parent.valid()) return base::ErrnoStatus("open checkpoint directory", directory, errno);
  return checkpointer::LeaveAbortedMark(parent.get(), format::PartialName(name, attempt));
}

}  // namespace holdfast
