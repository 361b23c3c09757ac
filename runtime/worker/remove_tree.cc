#include "runtime/worker/remove_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "runtime/sys/errno_code.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/job_run.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kTruncateStepBytes = 256ull << 20;
constexpr char kManifestSuffix[] = ".manifest.json";
// Entries that come while others are removed: not Holdfast's doing, so the passes are bounded.
constexpr int kPassesMax = 1000;

// The kernel's record (getdents64(2)); the C library has no name for it.
struct Entry {
  uint64_t inode;
  int64_t next;
  uint16_t bytes;
  uint8_t type;
  char name[1];
};

bool IsDots(const char* name) { return strcmp(name, ".") == 0 || strcmp(name, "..") == 0; }

bool IsManifest(const char* name) {
  const size_t length = strlen(name);
  constexpr size_t kSuffixBytes = sizeof(kManifestSuffix) - 1;
  return length >= kSuffixBytes && strcmp(name + length - kSuffixBytes, kManifestSuffix) == 0;
}

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

/// One walk over the directory. An fd of its own: entries that go while it walks may hide others,
/// so walks are repeated from the start until one finds nothing.
bool Pass(Removal* removal, bool manifests_only, bool* removed) {
  const int fd = sys::OpenOwned(removal->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return removal->FailErrno(errno);
  bool ok = true;
  while (ok) {
    const ssize_t got = sys::Sys().getdents64(fd, removal->buffer, kDirectoryBufferBytes);
    if (got < 0) ok = removal->FailErrno(errno);
    if (got <= 0) break;
    for (ssize_t at = 0; ok && at < got;) {
      const Entry* const entry = reinterpret_cast<const Entry*>(removal->buffer + at);
      at += entry->bytes;
      if (IsDots(entry->name)) continue;
      if (manifests_only && !IsManifest(entry->name)) continue;
      ok = removal->Cancelled() ? removal->FailCancelled()
                                : RemoveEntry(removal, entry->name, removed);
    }
  }
  sys::CloseOwned(fd);
  return ok;
}

bool RemoveContents(Removal* removal) {
  for (const bool manifests_only : {true, false}) {
    bool any = false;
    for (int pass = 0; pass < kPassesMax; ++pass) {
      bool removed = false;
      if (!Pass(removal, manifests_only, &removed)) return false;
      if (!removed) break;
      any = true;
    }
    // Without it a crash could keep the manifest and lose files that it names; by its name such a
    // directory would still pass for a checkpoint until somebody looked closer.
    if (manifests_only && any && sys::Sys().fsync(removal->directory) != 0) {
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
  const bool emptied = RemoveContents(&removal);
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

bool HoldsOnly(int directory, const char* name, char* buffer) {
  const int fd = sys::OpenOwned(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return false;
  bool only = true;
  bool seen = false;
  ssize_t got = 0;
  while (only && (got = sys::Sys().getdents64(fd, buffer, kDirectoryBufferBytes)) > 0) {
    for (ssize_t at = 0; at < got;) {
      const Entry* const entry = reinterpret_cast<const Entry*>(buffer + at);
      at += entry->bytes;
      if (IsDots(entry->name)) continue;
      if (strcmp(entry->name, name) == 0) {
        seen = true;
      } else {
        only = false;
      }
    }
  }
  sys::CloseOwned(fd);
  return only && seen && got == 0;
}

}  // namespace holdfast::worker
