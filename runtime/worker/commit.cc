#include "runtime/worker/commit.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/manifest.h"
#include "runtime/worker/remove_tree.h"

namespace holdfast::worker {
namespace {

constexpr int kNapMsMin = 1;
constexpr int kNapMsMax = 100;

/// Bounded waiting with growing naps: ranks end within milliseconds of each other, or not at all.
class Patience {
 public:
  explicit Patience(JobRun* run)
      : run_(run), end_ns_(sys::NowNs() + DeadlineNs(run->job->time_ranks_max_ns)) {}
  /// False, with the failure recorded, when the deadline has passed.
  bool Wait() {
    if (sys::NowNs() >= end_ns_) {
      return Fail(run_, FailureCode::kDeadlineExceeded, Operation::kWaitRanks);
    }
    Nap(run_, nap_ms_);
    nap_ms_ = nap_ms_ * 2 < kNapMsMax ? nap_ms_ * 2 : kNapMsMax;
    return true;
  }
  void Reset() { nap_ms_ = kNapMsMin; }

 private:
  JobRun* run_;
  uint64_t end_ns_;
  int nap_ms_ = kNapMsMin;
};

/// "PREFIX00042SUFFIX"
void RankManifestName(const layout::Job& job, uint32_t rank, char (&out)[kNameBytes]) {
  constexpr uint32_t kDigits = 5;
  size_t at = strlen(job.manifest_prefix);
  memcpy(out, job.manifest_prefix, at);
  for (uint32_t digit = kDigits; digit-- > 0; rank /= 10) {
    out[at + digit] = static_cast<char>('0' + rank % 10);
  }
  at += kDigits;
  memcpy(out + at, job.manifest_suffix, strlen(job.manifest_suffix) + 1);
}

/// Rank 0: all votes are there.
bool WaitForVotes(JobRun* run) {
  const layout::Job& job = *run->job;
  Patience patience(run);
  for (uint32_t rank = 1; rank < job.world_size;) {
    if (MustStop(run, true)) return false;
    char name[kNameBytes];
    RankManifestName(job, rank, name);
    int error = 0;
    switch (FindManifest(*run, run->directory, name, &error)) {
      case Found::kYes:
        ++rank;
        patience.Reset();
        continue;
      case Found::kOther:
        // Two attempts in one directory: a mistake in the launch of the ranks.
        return Fail(run, FailureCode::kFailedPrecondition, Operation::kWaitRanks);
      case Found::kFailed:
        return FailErrno(run, Operation::kWaitRanks, error);
      case Found::kNo:
        break;
    }
    if (SomeoneAborted(*run)) return Fail(run, FailureCode::kAborted, Operation::kWaitRanks);
    if (!patience.Wait()) return false;
  }
  return true;
}

/// A vote is seen at its rename, which may be before its own rank has made that durable: without
/// this a crash after the commit could take a manifest away from a checkpoint that was reported.
bool KeepVotes(JobRun* run) {
  if (run->job->world_size == 1 || sys::Sys().fsync(run->directory) == 0) return true;
  return FailErrno(run, Operation::kSyncDirectory, errno);
}

/// The name that an old checkpoint steps aside to where directories cannot be exchanged: a partial
/// one of no attempt, so that a recovery removes it whatever happens.
void AsideName(const layout::Job& job, char (&out)[kNameBytes]) {
  memcpy(out, job.partial, sizeof(out));
  char* const last = out + strlen(out) - 1;
  *last = *last == '0' ? '1' : '0';
}

/// Puts the new directory in the place of an existing one. Returns 0 or an errno; `*old` is where
/// the old one is now.
int Replace(JobRun* run, char (&old)[kNameBytes]) {
  const layout::Job& job = *run->job;
  memcpy(old, job.partial, sizeof(old));
  // At every moment one of the two stands under the name, whole.
  if (sys::Sys().renameat2(run->parent, job.partial, run->parent, job.target, RENAME_EXCHANGE) ==
      0) {
    return 0;
  }
  if (errno != EINVAL && errno != ENOSYS) return errno;
  AsideName(job, old);
  if (sys::Sys().renameat2(run->parent, job.target, run->parent, old, 0) != 0) return errno;
  // A crash here leaves the name empty and the new checkpoint complete: a recovery promotes it.
  if (sys::Sys().renameat2(run->parent, job.partial, run->parent, job.target, 0) == 0) return 0;
  const int error = errno;
  sys::Sys().renameat2(run->parent, old, run->parent, job.target, 0);
  return error;
}

/// The one rename. On success `*old` names what was replaced, or is empty.
int RenameDirectory(JobRun* run, char (&old)[kNameBytes]) {
  const layout::Job& job = *run->job;
  old[0] = '\0';
  if (sys::Sys().renameat2(run->parent, job.partial, run->parent, job.target, RENAME_NOREPLACE) ==
      0) {
    return 0;
  }
  int error = errno;
  if (error == EINVAL || error == ENOSYS) {
    // Without the flag rename(2) refuses a directory that is not empty, and one with nothing in it
    // is no checkpoint.
    if (sys::Sys().renameat2(run->parent, job.partial, run->parent, job.target, 0) == 0) return 0;
    error = errno;
  }
  const bool exists = error == EEXIST || error == ENOTEMPTY;
  if (!exists) return error;
  return run->Has(layout::kReplaceExisting) ? Replace(run, old) : EEXIST;
}

/// Whether the target is this very attempt: renamed by rank 0, or promoted by a recovery that took
/// this worker for dead.
bool TargetIsOurs(JobRun* run) {
  const int directory = sys::OpenOwned(run->parent, run->job->target,
                                       O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (directory < 0) return false;
  int error = 0;
  const bool ours = FindManifest(*run, directory, run->job->manifest, &error) == Found::kYes;
  sys::CloseOwned(directory);
  return ours;
}

bool SyncParent(JobRun* run) {
  const uint64_t begin = sys::NowNs();
  // Without it a crash right after "durable" was reported brings the old name back. The checkpoint
  // is complete then too, but only a recovery would find it.
  if (sys::Sys().fsync(run->parent) != 0) return FailErrno(run, Operation::kSyncDirectory, errno);
  const uint64_t end = sys::NowNs();
  run->time_syncing_ns += end - begin;
  run->times.committed = end;
  return true;
}

/// The replaced checkpoint. Removing takes a quarter of a second per GiB, so it is the trainer's
/// business, in the background: neither the result nor a kept worker's next job waits for it.
void DisposeOf(JobRun* run, const char (&old)[kNameBytes]) {
  if (!TrainerIsDead(run)) {
    memcpy(run->job->completion.left_behind, old, sizeof(old));
    return;
  }
  SetPhase(run, layout::Phase::kRemoving);
  Failure ignored;  // The save is durable. What is left is a recovery's.
  RemoveDirectory(run->parent, old, run->directory_buffer, run->job, &ignored);
}

bool CommitDirectory(JobRun* run) {
  SetPhase(run, layout::Phase::kCommitting);
  // The last moment at which a cancel counts.
  if (MustStop(run, true)) return false;
  char old[kNameBytes];
  const int error = RenameDirectory(run, old);
  if (error != 0 && !(error == ENOENT && TargetIsOurs(run))) {
    // ENOENT: a recovery fenced this worker; the files are its now.
    return error == ENOENT ? Fail(run, FailureCode::kAborted, Operation::kRename)
                           : FailErrno(run, Operation::kRename, error);
  }
  // From here on nothing is undone: others see the checkpoint, and it is complete and sound. If the
  // next fsync fails, the save is reported as failed and the checkpoint stays.
  run->committed = true;
  if (!SyncParent(run)) return false;
  // Only now: before the fsync a crash could bring back the names, with the old one half removed.
  if (old[0] != '\0') DisposeOf(run, old);
  return true;
}

/// Other ranks: rank 0 has decided.
bool WaitForTarget(JobRun* run) {
  Patience patience(run);
  bool vanished = false;
  while (true) {
    if (TargetIsOurs(run)) {
      run->committed = true;
      return SyncParent(run);
    }
    if (vanished) {
      // Neither under one name nor under the other: a recovery fenced it.
      return Fail(run, FailureCode::kAborted, Operation::kWaitRanks);
    }
    if (SomeoneAborted(*run)) {
      run->voted = false;  // Nobody can commit any more, so these files are this rank's again.
      return Fail(run, FailureCode::kAborted, Operation::kWaitRanks);
    }
    struct stat status = {};
    vanished =
        sys::Sys().fstatat(run->parent, run->job->partial, &status, AT_SYMLINK_NOFOLLOW) != 0 &&
        errno == ENOENT;
    if (vanished) continue;  // The rename may have come between the two looks: look once more.
    if (!patience.Wait()) return false;
  }
}

}  // namespace

bool Commit(JobRun* run) {
  if (run->Has(layout::kFilesOnly)) {
    // The names are durable already; the framework's own last file commits. The directory's entry
    // too, or "durable" could name a place that a crash takes away.
    run->committed = true;
    return SyncParent(run);
  }
  SetPhase(run, layout::Phase::kWaitingForRanks);
  if (run->Decides()) return WaitForVotes(run) && KeepVotes(run) && CommitDirectory(run);
  return WaitForTarget(run);
}

}  // namespace holdfast::worker
