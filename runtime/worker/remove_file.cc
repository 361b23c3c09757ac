#include "runtime/worker/remove_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/job_run.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kTruncateStepBytes = 256ull << 20;

int Shrink(int directory, const char* name, uint64_t bytes, layout::Job* job, OnCancel on_cancel) {
  if (bytes <= kTruncateStepBytes) return 0;
  const int fd = sys::OpenOwned(directory, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  int error = 0;
  while (bytes > kTruncateStepBytes) {
    if (on_cancel == OnCancel::kStop && job->cancel.load(std::memory_order_relaxed) != 0) {
      error = ECANCELED;
      break;
    }
    bytes -= kTruncateStepBytes;
    if (sys::Sys().ftruncate(fd, static_cast<off_t>(bytes)) != 0) break;
    CountStep(job);
  }
  sys::CloseOwned(fd);
  return error;
}

}  // namespace

int RemoveFile(int directory, const char* name, layout::Job* job, OnCancel on_cancel) {
  HOLDFAST_ASSERT(directory >= 0 && strchr(name, '/') == nullptr);
  struct stat status = {};
  // After a failed fstatat the unlink frees the file at once or returns the errno.
  const bool seen = sys::Sys().fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) == 0;
  if (seen && S_ISDIR(status.st_mode)) return EISDIR;
  if (seen && S_ISREG(status.st_mode) && status.st_nlink == 1) {
    const int error =
        Shrink(directory, name, static_cast<uint64_t>(status.st_size), job, on_cancel);
    if (error != 0) return error;
  }
  if (sys::Sys().unlinkat(directory, name, 0) != 0) return errno;
  CountStep(job);
  return 0;
}

int SyncRemovals(int directory) {
  if (sys::Sys().fsync(directory) == 0 || errno == EINVAL) return 0;
  return errno;
}

}  // namespace holdfast::worker
