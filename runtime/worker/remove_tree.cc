#include "runtime/worker/remove_tree.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/errno_code.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/job_run.h"
#include "runtime/worker/listing.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kTruncateStepBytes = 256ull << 20;
// Entries that come while others are removed: not Holdfast's doing, so the passes are bounded.
constexpr int kPassesMax = 1000;

struct Removal {
  int directory = -1;
  char* buffer = nullptr;
  layout::Job* job = nullptr;
  Failure* failure = nullptr;
  bool subdirectory = false;

  bool Cancelled() const { return job->cancel.load(std::memory_order_relaxed) != 0; }
  bool Fail(FailureCode code, Operation operation, int error_number) {
    if (failure->ok()) {
      failure->code = code;
      failure->operation = operation;
      failure->error_number = error_number;
    }
    return false;
  }
  bool FailErrno(int error_number) {
    return Fail(sys::CodeOfErrno(error_number), Operation::kRemove, error_number);
  }
  bool FailCancelled() { return Fail(FailureCode::kCancelled, Operation::kCancel, 0); }
};

/// Frees a large file's blocks in steps. A file with another name elsewhere keeps its bytes.
bool Shrink(Removal* removal, const char* name, const struct stat& status) {
  if (!S_ISREG(status.st_mode) || status.st_nlink != 1) return true;
  uint64_t bytes = static_cast<uint64_t>(status.st_size);
  if (bytes <= kTruncateStepBytes) return true;
  const int fd = sys::OpenOwned(removal->directory, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) return true;  // The unlink frees it in one go, or says why not.
  bool ok = true;
  while (bytes > kTruncateStepBytes) {
    if (removal->Cancelled()) {
      ok = removal->FailCancelled();
      break;
    }
    bytes -= kTruncateStepBytes;
    if (sys::Sys().ftruncate(fd, static_cast<off_t>(bytes)) != 0) break;
    CountStep(removal->job);
  }
  sys::CloseOwned(fd);
  return ok;
}

/// Removes one entry. False ends the pass.
bool RemoveEntry(Removal* removal, const char* name, bool* removed) {
  struct stat status = {};
  if (sys::Sys().fstatat(removal->directory, name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
    return errno == ENOENT || removal->FailErrno(errno);
  }
  if (S_ISDIR(status.st_mode)) {
    removal->subdirectory = true;
    return true;
  }
  if (!Shrink(removal, name, status)) return false;
  if (sys::Sys().unlinkat(removal->directory, name, 0) != 0 && errno != ENOENT) {
    return removal->FailErrno(errno);
  }
  *removed = true;
  CountStep(removal->job);
  return true;
}

/// One walk over the directory. Entries that go while it walks may hide others, so walks are
/// repeated from the start until one finds nothing.
bool Pass(Removal* removal, bool commit_files_only, bool* removed) {
  bool ok = true;
  const int error = ForEachEntry(removal->directory, removal->buffer, [&](const char* name) {
    if (commit_files_only && !IsCommitFile(name)) return true;
    ok = removal->Cancelled() ? removal->FailCancelled() : RemoveEntry(removal, name, removed);
    return ok;
  });
  return ok && (error == 0 || removal->FailErrno(error));
}

/// Before anything is removed: what once was a checkpoint may hold entries of others by now.
bool IsRemovable(Removal* removal, const char* name) {
  const Contents contents = LookInto(removal->directory, removal->buffer);
  if (contents.error_number != 0) return removal->FailErrno(contents.error_number);
  if (!MustKeep(contents, name)) return true;
  memcpy(removal->job->completion.foreign, contents.foreign, sizeof(contents.foreign));
  return removal->Fail(FailureCode::kFailedPrecondition, Operation::kRemove, 0);
}

bool RemoveContents(Removal* removal) {
  for (const bool commit_files_only : {true, false}) {
    bool any = false;
    for (int pass = 0; pass < kPassesMax; ++pass) {
      bool removed = false;
      if (!Pass(removal, commit_files_only, &removed)) return false;
      if (!removed) break;
      any = true;
    }
    // Without it a crash could keep the manifest and lose files that it names; by its name such a
    // directory would still pass for a checkpoint until somebody looked closer.
    if (commit_files_only && any && sys::Sys().fsync(removal->directory) != 0) {
      return removal->FailErrno(errno);
    }
  }
  return true;
}

}  // namespace

bool RemoveDirectory(int parent, const char* name, char* buffer, layout::Job* job,
                     Failure* failure) {
  Removal removal = {.buffer = buffer, .job = job, .failure = failure};
  removal.directory =
      sys::OpenOwned(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (removal.directory < 0) return errno == ENOENT || removal.FailErrno(errno);
  const bool emptied = IsRemovable(&removal, name) && RemoveContents(&removal);
  sys::CloseOwned(removal.directory);
  if (!emptied) return false;
  if (removal.subdirectory) {
    return removal.Fail(FailureCode::kFailedPrecondition, Operation::kRemove, 0);
  }
  if (sys::Sys().unlinkat(parent, name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return removal.FailErrno(errno);
  }
  // So that what was reported as removed does not come back as an empty directory.
  if (sys::Sys().fsync(parent) != 0) return removal.FailErrno(errno);
  return true;
}

bool IsEmpty(int directory, char* buffer) {
  bool empty = true;
  const int error = ForEachEntry(directory, buffer, [&](const char*) { return empty = false; });
  return empty && error == 0;
}

}  // namespace holdfast::worker
