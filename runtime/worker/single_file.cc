#include "runtime/worker/single_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "runtime/digest/digest.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/listing.h"
#include "runtime/worker/open_files.h"
#include "runtime/worker/planted_bugs.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_name_manifest_late = false;
}  // namespace testing
#endif

namespace {

constexpr int kLockSleepMs = 10;
constexpr char kJson[] = ".json";
constexpr char kTemporary[] = ".tmp";

/// Returns where the attempt stands in a name that ends with the attempt and `suffix`.
size_t AttemptAt(const char* name, const char* suffix) {
  const size_t length = strlen(name);
  HOLDFAST_ASSERT(length > digest::kHexDigits + strlen(suffix));
  return length - strlen(suffix) - digest::kHexDigits;
}

/// The name of this save's own companion, with another attempt.
void NameWith(const char* own, const char* suffix, const AttemptId& attempt,
              char (&out)[kNameBytes]) {
  HOLDFAST_ASSERT(strlen(own) < sizeof(out));
  memset(out, 0, sizeof(out));
  memcpy(out, own, strlen(own));
  digest::ToHex(attempt, out + AttemptAt(own, suffix));
}

/// Reads the attempt of a manifest of the same file. Returns false for any other name.
bool ParseManifest(const layout::Job& job, const char* name, AttemptId* attempt) {
  const size_t at = AttemptAt(job.manifest, kJson);
  return strlen(name) == strlen(job.manifest) && memcmp(name, job.manifest, at) == 0 &&
         strcmp(name + at + digest::kHexDigits, kJson) == 0 && digest::FromHex(name + at, attempt);
}

/// Returns true when the attempt's file has the final name. A manifest beside a temporary file
/// belongs to a save before the rename.
bool HasCommitted(const JobRun& run, const AttemptId& attempt) {
  char temporary[kNameBytes];
  NameWith(run.job->partial, kTemporary, attempt, temporary);
  struct stat found = {};
  return sys::Sys().fstatat(run.directory, temporary, &found, AT_SYMLINK_NOFOLLOW) != 0 &&
         errno == ENOENT;
}

/// Fails when a save that began later has committed.
bool NoYoungerSave(JobRun* run) {
  AttemptId younger;
  const int error = ForEachEntry(run->directory, run->directory_buffer, [&](const char* name) {
    AttemptId attempt;
    if (!ParseManifest(*run->job, name, &attempt) || attempt == run->job->attempt ||
        layout::IsOlder(run->job, attempt) || !HasCommitted(*run, attempt)) {
      return true;
    }
    younger = attempt;
    return false;
  });
  if (error != 0) return FailErrno(run, Operation::kReplace, error, 0);
  if (younger == AttemptId{}) return true;
  run->job->completion.newer = younger;
  return Fail(run, FailureCode::kAborted, Operation::kReplace, 0);
}

/// Takes the lock under which files of the directory are replaced. `*lock` is -1 where the file
/// system has no such lock.
bool LockDirectory(JobRun* run, int* lock) {
  // A lock belongs to an open file description.
  *lock = sys::OpenOwned(run->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (*lock < 0) return FailErrno(run, Operation::kReplace, errno, 0);
  const uint64_t end_ns = sys::NowNs() + DeadlineNs(run->job->time_stalled_max_ns);
  while (sys::Uninterrupted([&] { return sys::Sys().flock(*lock, LOCK_EX | LOCK_NB); }) != 0) {
    if (errno != EWOULDBLOCK) return true;
    if (MustStop(run, true)) return false;
    if (sys::NowNs() > end_ns) {
      return Fail(run, FailureCode::kDeadlineExceeded, Operation::kReplace, 0);
    }
    SleepUntilRung(run, kLockSleepMs);
    CountStep(run->job);  // Another save, or a recovery, is at work.
  }
  return true;
}

/// Gives the file its name, under which only the whole file may stand.
bool RenameFile(JobRun* run) {
  if (!NoYoungerSave(run)) return false;
  if (!CheckOurs(run, 0, Operation::kRename) || !CheckWritten(run, 0, run->job->partial))
    return false;
#ifdef HOLDFAST_PLANTED_BUGS
  char unnamed[kNameBytes];
  TemporaryName(run->job->manifest, unnamed);
  if (testing::g_name_manifest_late) RenameNew(run, run->job->manifest, unnamed);
#endif
  const int error = RenameNew(run, run->job->partial, layout::Files(run->job)[0].name);
  if (error != 0) return FailErrno(run, Operation::kRename, error, 0);
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_name_manifest_late) RenameNew(run, unnamed, run->job->manifest);
#endif
  return true;
}

/// Takes the name. From then on nothing is undone.
bool TakeName(JobRun* run) {
  HOLDFAST_ASSERT(!run->committed && run->notes[0].renamed == 0);
  if (!IsPromoted(*run) && !RenameFile(run)) return false;
  run->notes[0].renamed = 1;
  run->committed = true;
  const uint64_t begin = sys::NowNs();
  // Before any older manifest is removed: a crash could bring the old file back.
  const bool synced = sys::Sys().fsync(run->directory) == 0;
  run->time_syncing_ns += sys::NowNs() - begin;
  return synced || FailErrno(run, Operation::kSyncDirectory, errno);
}

/// True while a trainer or a worker holds the temporary file of a save.
bool IsRunning(const JobRun& run, const char* temporary) {
  const int fd = sys::OpenOwned(run.directory, temporary, O_RDONLY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool held =
      sys::Uninterrupted([&] { return sys::Sys().flock(fd, LOCK_EX | LOCK_NB); }) != 0 &&
      errno == EWOULDBLOCK;
  sys::CloseOwned(fd);
  return held;
}

/// Removes the companions of older saves that have ended. A running older save ends with kAborted,
/// because a younger manifest stands there, and removes its own: without its temporary file its
/// manifest would look committed. After a crash the next save removes the rest.
void RemoveOlder(JobRun* run) {
  HOLDFAST_ASSERT(run->committed);
  const layout::Job& job = *run->job;
  for (uint64_t i = 0; i < job.older.bytes / sizeof(AttemptId); ++i) {
    const AttemptId& older = layout::Older(run->job)[i];
    if (older == job.attempt) continue;
    char name[kNameBytes];
    char temporary[kNameBytes];
    NameWith(job.partial, kTemporary, older, temporary);
    if (IsRunning(*run, temporary)) continue;
    NameWith(job.manifest, kJson, older, name);
    sys::Sys().unlinkat(run->directory, name, 0);
    sys::Sys().unlinkat(run->directory, temporary, 0);
    TemporaryName(name, temporary);
    sys::Sys().unlinkat(run->directory, temporary, 0);
    CountStep(run->job);
  }
}

}  // namespace

bool CommitSingleFile(JobRun* run) {
  HOLDFAST_ASSERT(run->manifest_named && run->job->file_count == 1 && run->notes[0].synced != 0);
  SetPhase(run, layout::Phase::kCommitting);
  // The last moment at which a cancel takes effect.
  if (MustStop(run, true)) return false;
  int lock = -1;
  // Without the lock an older save could look before this save's rename, and rename after it.
  const bool done = LockDirectory(run, &lock) && TakeName(run);
  if (lock >= 0) sys::CloseOwned(lock);
  if (done) RemoveOlder(run);
  return done;
}

bool IsPromoted(const JobRun& run) {
  HOLDFAST_ASSERT(run.Has(layout::kSingleFile) && run.directory >= 0 && run.lock >= 0);
  return LeadsTo(run.directory, layout::Files(run.job)[0].name, run.lock) == 0;
}

bool CheckTemporary(JobRun* run) {
  const int moved = LeadsTo(run->directory, run->job->partial, run->lock);
  return moved == 0 || FailErrno(run, Operation::kOpen, moved, 0);
}

}  // namespace holdfast::worker
