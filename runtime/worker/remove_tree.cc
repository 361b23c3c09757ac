#include "runtime/worker/remove_tree.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/errno_code.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/exchange.h"
#include "runtime/worker/job_run.h"
#include "runtime/worker/listing.h"
#include "runtime/worker/planted_bugs.h"
#include "runtime/worker/rank_board.h"
#include "runtime/worker/remove_file.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_remove_unnamed_files = false;
bool g_remove_before_parent_sync = false;
}  // namespace testing
#endif

namespace {

// Another program may add entries during the removal, so the passes are bounded.
constexpr int kPassesMax = 1000;

struct Removal {
  int directory = -1;
  char* buffer = nullptr;
  layout::Job* job = nullptr;
  Failure* failure = nullptr;
  Inventory inventory;

  bool Fail(FailureCode code, Operation operation, int error_number) {
    if (failure->ok()) {
      failure->code = code;
      failure->operation = operation;
      failure->error_number = error_number;
    }
    return false;
  }
  bool FailErrno(int error_number) {
    if (error_number == ECANCELED) return Fail(FailureCode::kCancelled, Operation::kCancel, 0);
    return Fail(sys::CodeOfErrno(error_number), Operation::kRemove, error_number);
  }
  bool FailForeign(const char* name) {
    HOLDFAST_ASSERT(name[0] != '\0' && strnlen(name, kNameBytes) < kNameBytes);
    memcpy(job->completion.foreign, name, strlen(name) + 1);
    return Fail(FailureCode::kFailedPrecondition, Operation::kRemove, 0);
  }
};

/// Removes every file whose name `wanted` accepts, in walks over the directory. An entry removed
/// during a walk may hide further entries. Walks therefore repeat from the start until a walk finds
/// no file.
template <typename Wanted>
bool Sweep(Removal* removal, Wanted&& wanted) {
  HOLDFAST_ASSERT(removal->directory >= 0 && removal->failure->ok());
  for (int pass = 0; pass < kPassesMax; ++pass) {
    bool removed = false;
    int error = 0;
    const int listed = ForEachEntry(removal->directory, removal->buffer, [&](const char* name) {
      if (!wanted(name)) return true;
      if (removal->job->cancel.load(std::memory_order_relaxed) != 0) {
        error = ECANCELED;
        return false;
      }
      error = RemoveFile(removal->directory, name, removal->job, OnCancel::kStop);
      removed |= error == 0;
      if (error == ENOENT || error == EISDIR) error = 0;
      return error == 0;
    });
    if (error != 0 || listed != 0) return removal->FailErrno(error != 0 ? error : listed);
    if (!removed) return true;
  }
  return true;
}

bool Sync(Removal* removal) {
  const int error = SyncRemovals(removal->directory);
  return error == 0 || removal->FailErrno(error);
}

/// Marks the directory as a save's, as far as possible (the disk may be full): see IsMark.
void Mark(int directory) {
  if (sys::Sys().renameat2(directory, layout::kCommitRecordName, directory, kMarkName, 0) == 0)
    return;
  const int fd = sys::OpenOwned(directory, kMarkName, O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC,
                                sys::kFileMode);
  if (fd >= 0) sys::CloseOwned(fd);
}

/// Removes a directory that never was a checkpoint, under a name that a recovery may take for a
/// complete checkpoint. The manifests go first and durably: a crash could otherwise keep the
/// manifests and lose files. The marks go last, once the removal of the files is durable: a
/// recovery needs them to continue.
bool RemoveUncommitted(Removal* removal) {
  Mark(removal->directory);
  bool any = false;
  return Sweep(removal,
               [&any](const char* name) {
                 const bool wanted = IsCommitFile(name);
                 any |= wanted;
                 return wanted;
               }) &&
         (!any || Sync(removal)) &&
         Sweep(removal, [](const char* name) { return !IsMark(name); }) && Sync(removal) &&
         Sweep(removal, IsMark);
}

/// Removes a former checkpoint, under a name that no reader takes for a checkpoint. The manifests
/// go last: until then they distinguish foreign files, also after a crash. The record goes first:
/// readers of the record do not look at the files.
bool RemoveCommitted(Removal* removal) {
  const auto is_record = [](const char* name) {
    return strcmp(name, layout::kCommitRecordName) == 0;
  };
  const auto is_data = [removal](const char* name) {
#ifdef HOLDFAST_PLANTED_BUGS
    if (testing::g_remove_unnamed_files) return true;
#endif
    return !IsCommitFile(name) && removal->inventory.Holds(name);
  };
  return Sweep(removal, is_record) && Sweep(removal, is_data) && Sync(removal) &&
         Sweep(removal, IsCommitFile);
}

/// Removes the contents of the open directory `*name`, which may be renamed first.
bool RemoveContents(Removal* removal, int parent, char (&name)[kNameBytes]) {
  HOLDFAST_ASSERT(removal->directory >= 0 && name[0] != '\0');
  const Contents contents = LookInto(removal->directory, removal->buffer, &removal->inventory);
  if (contents.error_number != 0) return removal->FailErrno(contents.error_number);
  if (contents.empty) return true;
  if (contents.holds_directory || MustKeep(contents, name)) {
    return removal->FailForeign(contents.foreign);
  }
  if (const size_t bytes = CommittedBytes(contents, name); bytes != 0) {
    HOLDFAST_ASSERT(bytes < kNameBytes && !IsRetiredName(name));
    char checkpoint[kNameBytes] = {};
    memcpy(checkpoint, name, bytes);
    Hide(parent, checkpoint, contents.attempt, name);
  }
  const bool retired = IsRetiredName(name);
  // Before the first file goes: power loss must not restore the other name of a half removed
  // directory. A running save may have renamed the directory a moment ago.
  bool syncs = retired || CommittedBytes(contents, name) != 0;
#ifdef HOLDFAST_PLANTED_BUGS
  syncs = syncs && !testing::g_remove_before_parent_sync;
#endif
  if (syncs && sys::Sys().fsync(parent) != 0) return removal->FailErrno(errno);
  if (!(retired ? RemoveCommitted(removal) : RemoveUncommitted(removal))) return false;
  char left[kNameBytes] = {};
  const int error = ForEachEntry(removal->directory, removal->buffer, [&left](const char* entry) {
    CopyText(entry, left, sizeof(left));
    return false;
  });
  if (error != 0) return removal->FailErrno(error);
  return left[0] == '\0' || removal->FailForeign(left);
}

}  // namespace

bool RemoveDirectory(int parent, const char* name, char* buffer, layout::Job* job,
                     Failure* failure) {
  // One component: nothing outside of the parent is ever removed.
  HOLDFAST_ASSERT(name[0] != '\0' && strchr(name, '/') == nullptr && strcmp(name, "..") != 0);
  HOLDFAST_ASSERT(failure->ok());
  Removal removal;
  removal.buffer = buffer;
  removal.job = job;
  removal.failure = failure;
  removal.directory =
      sys::OpenOwned(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (removal.directory < 0) return errno == ENOENT || removal.FailErrno(errno);
  char now[kNameBytes] = {};
  memcpy(now, name, strnlen(name, sizeof(now) - 1));
  const bool emptied = RemoveContents(&removal, parent, now);
  sys::CloseOwned(removal.directory);
  if (!emptied) return false;
  if (sys::Sys().unlinkat(parent, now, AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return removal.FailErrno(errno);
  }
  // Keeps a directory that was reported as removed from coming back empty.
  const int error = SyncRemovals(parent);
  return error == 0 || removal.FailErrno(error);
}

bool IsEmpty(int directory, char* buffer) {
  bool empty = true;
  const int error = ForEachEntry(directory, buffer, [&](const char*) { return empty = false; });
  return empty && error == 0;
}

}  // namespace holdfast::worker
