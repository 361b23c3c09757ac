#include "runtime/worker/commit.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/commit_record.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/exchange.h"
#include "runtime/worker/manifest.h"
#include "runtime/worker/open_files.h"
#include "runtime/worker/planted_bugs.h"
#include "runtime/worker/ranks.h"
#include "runtime/worker/remove_tree.h"
#include "runtime/worker/replicas.h"
#include "runtime/worker/single_file.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_retire_before_fsync = false;
bool g_commit_before_manifests = false;
}  // namespace testing
#endif

namespace {

// While another save replaces the checkpoint under the same name.
constexpr int kReplaceSleepMs = 10;
// For rank 0, because every other rank waits for rank 0.
constexpr uint64_t kSleepMaxNs = 200 * sys::kNsPerMs;
// For the other ranks: each sleep ends with one read of the board by every rank of the job.
constexpr uint64_t kFollowerSleepMaxNs = sys::kNsPerSecond;

/// A bounded wait whose sleeps are a share of the elapsed wait. Ranks that end within milliseconds
/// of each other lose no time, and a long wait costs few reads.
class RankWait {
 public:
  explicit RankWait(JobRun* run)
      : run_(run),
        begin_ns_(sys::NowNs()),
        sleep_max_ns_(run->Decides() ? kSleepMaxNs : kFollowerSleepMaxNs) {
    const uint64_t liveness = LivenessNs(*run->job) / 4;
    if (liveness < sleep_max_ns_) sleep_max_ns_ = liveness;
    HOLDFAST_ASSERT(run->HasRanks());
    BeginWaiting(run);
  }
  /// False, with the reason in `ranks.seen`, when `rank` was waited for until the deadline.
  bool Continue(uint32_t rank) {
    HOLDFAST_ASSERT(rank < run_->job->world_size);
    constexpr uint64_t kShare = 8;
    const uint64_t now = sys::NowNs();
    sys::OwnGap::Forgive(gap_.Round(now), now, &begin_ns_);
    const uint64_t waited = now - begin_ns_;
    const uint64_t limit = DeadlineNs(run_->job->time_ranks_max_ns);
    if (waited >= limit) {
      RankWatch& watch = run_->ranks;
      watch.seen = layout::RankFailure{};
      watch.seen.rank = rank;
      const PulseNote& note = watch.notes[run_->Decides() ? rank : 0];
      watch.seen.kind = static_cast<uint32_t>(note.state == layout::RankState::kAbsent
                                                  ? layout::RankFailureKind::kAbsent
                                                  : layout::RankFailureKind::kSlow);
      watch.seen.seconds =
          static_cast<uint32_t>((limit + sys::kNsPerSecond / 2) / sys::kNsPerSecond);
      watch.found_here = true;
      return false;
    }
    const uint64_t sleep_ns = waited / kShare < sleep_max_ns_ ? waited / kShare : sleep_max_ns_;
    SleepUntilRung(run_, static_cast<int>(sleep_ns / sys::kNsPerMs) + 1);
    run_->ranks.look_at_ns = 0;
    return true;
  }

 private:
  JobRun* run_;
  uint64_t begin_ns_;
  sys::OwnGap gap_;
  uint64_t sleep_max_ns_;
};

/// Rank 0: waits until all votes are present. The board hints when to look for a vote; the manifest
/// is the vote.
bool WaitForVotes(JobRun* run) {
  const layout::Job& job = *run->job;
  if (job.world_size == 1) return true;
  HOLDFAST_ASSERT(run->ranks.notes != nullptr && run->manifest_named);
  RankWait waiting(run);
  for (uint32_t rank = 1; rank < job.world_size && !run->ranks.promoted;) {
    if (MustStop(run, true)) return false;
    int error = 0;
    while (rank < job.world_size && run->ranks.notes[rank].state == layout::RankState::kVoted) {
      const Found found = FindVote(*run, rank, &error);
      // Two attempts in one directory: the ranks were launched with different attempts.
      if (found == Found::kOther)
        return Fail(run, FailureCode::kFailedPrecondition, Operation::kJoinRanks);
      if (found == Found::kDiffers) return FailReplicas(run, rank);
      if (found == Found::kFailed) return FailErrno(run, Operation::kJoinRanks, error);
      if (found == Found::kNo) break;
      ++rank;
    }
    if (rank < job.world_size && !waiting.Continue(rank)) return FailAsSeen(run);
  }
  return true;
}

/// Makes all votes durable. Rank 0 sees a vote at its rename, possibly before the voting rank has
/// made the rename durable. Without the fsync a crash after the commit could remove a manifest from
/// a reported checkpoint. The fsync also covers the name of the commit record.
bool KeepVotes(JobRun* run) {
  HOLDFAST_ASSERT(run->Decides() && run->directory >= 0);
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_commit_before_manifests) return true;
#endif
  if (run->job->world_size == 1 && !run->record_made) return true;
  if (sys::Sys().fsync(run->directory) == 0) return true;
  return FailErrno(run, Operation::kSyncDirectory, errno);
}

enum class Try { kDone, kAgain, kFailed };

/// Checks the checkpoint under the name, open as `standing`, and exchanges it.
Try ReplaceStanding(JobRun* run, int standing, char (&old)[kNameBytes]) {
  HOLDFAST_ASSERT(standing >= 0 && !run->committed);
  layout::CompletionSlot& slot = run->job->completion;
  const auto failed = [](bool) { return Try::kFailed; };
  const Contents contents = LookInto(standing, run->directory_buffer);
  // A save that has replaced the directory since the open removes the files during the look.
  if (contents.error_number == ENOENT || LeadsTo(run->parent, run->job->target, standing) != 0)
    return Try::kAgain;
  if (contents.error_number != 0) {
    return failed(FailErrno(run, Operation::kReplace, contents.error_number));
  }
  if (contents.empty) return Try::kAgain;
  if (contents.foreign[0] != '\0') {
    memcpy(slot.foreign, contents.foreign, sizeof(slot.foreign));
    return failed(Fail(run, FailureCode::kFailedPrecondition, Operation::kReplace));
  }
  if (!layout::IsOlder(run->job, contents.attempt)) {
    slot.newer = contents.attempt;
    slot.newer_step = contents.step;
    return failed(Fail(run, FailureCode::kAborted, Operation::kReplace));
  }
  int lock = -1;
  Try outcome = Try::kAgain;
  if (LockManifest(standing, contents.manifest, &lock) &&
      LeadsTo(run->parent, run->job->target, standing) == 0) {
    const int error =
        Exchange(run->parent, run->job->partial, run->job->target, contents.attempt, old);
    // ENOENT: a program without the lock has moved one of the two.
    outcome = error == 0        ? Try::kDone
              : error == ENOENT ? Try::kAgain
                                : failed(FailErrno(run, Operation::kRename, error));
  }
  if (lock >= 0) sys::CloseOwned(lock);
  return outcome;
}

Try ReplaceTarget(JobRun* run, char (&old)[kNameBytes]) {
  const int standing = sys::OpenOwned(run->parent, run->job->target,
                                      O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (standing < 0 && errno == ENOENT) return Try::kAgain;
  if (standing < 0) {
    FailErrno(run, Operation::kReplace, errno);
    return Try::kFailed;
  }
  const Try outcome = ReplaceStanding(run, standing, old);
  sys::CloseOwned(standing);
  return outcome;
}

/// The commit rename. On success `*old` names the replaced checkpoint, or is empty.
Try TakeName(JobRun* run, char (&old)[kNameBytes]) {
  const layout::Job& job = *run->job;
  old[0] = '\0';
  HOLDFAST_ASSERT(run->parent >= 0 && run->directory >= 0 && !run->committed);
  // A directory that another program has put in place holds other bytes than the worker proved.
  int error = LeadsTo(run->parent, job.partial, run->directory);
  // rename(2) takes a free name or the name of an empty directory, whose creator wants it filled.
  if (error == 0 && sys::Sys().renameat2(run->parent, job.partial, run->parent, job.target, 0) != 0)
    error = errno;
  if (error == 0 || (error == ENOENT && TargetIsOurs(run))) return Try::kDone;
  if (error == ENOENT || error == ESTALE) {
    // A recovery fenced this worker and owns the files now.
    Fail(run, FailureCode::kAborted, Operation::kRename);
    return Try::kFailed;
  }
  const bool exists = error == EEXIST || error == ENOTEMPTY;
  if (exists && run->Has(layout::kReplaceExisting)) return ReplaceTarget(run, old);
  // ENOTDIR: the target is a file.
  FailErrno(run, Operation::kRename, exists || error == ENOTDIR ? EEXIST : error);
  return Try::kFailed;
}

bool SyncParent(JobRun* run) {
  HOLDFAST_ASSERT(run->committed);
  const uint64_t begin = sys::NowNs();
  // Without the fsync a crash right after "durable" was reported brings the old name back. The
  // checkpoint is complete then too, but only a recovery would find it.
  if (sys::Sys().fsync(run->parent) != 0) return FailErrno(run, Operation::kSyncDirectory, errno);
  const uint64_t end = sys::NowNs();
  run->time_syncing_ns += end - begin;
  run->times.committed = end;
  return true;
}

/// Hands the replaced checkpoint to the trainer for removal in the background. Removal takes a
/// quarter of a second per GiB: neither the result nor a kept worker's next job waits.
void DisposeOf(JobRun* run, const char (&old)[kNameBytes]) {
  HOLDFAST_ASSERT(old[0] != '\0' && run->committed);
  if (!TrainerIsDead(run)) {
    memcpy(run->job->completion.left_behind, old, sizeof(old));
    return;
  }
  SetPhase(run, layout::Phase::kRemoving);
  Failure ignored;  // The save is durable; a recovery removes the rest.
  RemoveDirectory(run->parent, old, run->directory_buffer, run->job, &ignored);
}

/// Publishes that the rename is next, and looks at the board once more. A rank withdraws its vote
/// in the reverse order, so that either rank 0 or the rank sees the other's step.
bool AnnounceCommit(JobRun* run) {
  HOLDFAST_ASSERT(run->Decides() && !run->committed);
  if (!run->ranks.board.is_open()) return true;
  (void)WriteDecision(run->ranks.board, layout::Decision::kCommitting);
  run->ranks.look_at_ns = 0;
  return !RanksHaveFailed(run);
}

/// Removes the board after the decision. Waiting ranks have the board open. Where a network file
/// system drops an open file that was removed, they find the final name.
void RemoveBoard(JobRun* run) {
  HOLDFAST_ASSERT(run->committed);
  if (!run->ranks.board.is_open()) return;
  CloseBoard(&run->ranks.board);
  sys::Sys().unlinkat(run->directory, layout::kBoardName, 0);
}

/// Makes the final name durable. Readers see the complete checkpoint from here on, so nothing is
/// undone. If the next fsync fails, the save is reported as failed and the checkpoint stays.
bool KeepName(JobRun* run, const char (&old)[kNameBytes]) {
  HOLDFAST_ASSERT(run->Decides() && !run->committed);
  run->committed = true;
  // The directory may have been swapped between the look and the rename, or be retired already.
  if (LeadsTo(run->parent, run->job->target, run->directory) == ESTALE) {
    return Fail(run, FailureCode::kAborted, Operation::kRename);
  }
  if (run->ranks.board.is_open()) {
    (void)WriteDecision(run->ranks.board, layout::Decision::kCommitted);
  }
#ifdef HOLDFAST_PLANTED_BUGS
  const bool synced = testing::g_retire_before_fsync || SyncParent(run);
#else
  const bool synced = SyncParent(run);
#endif
  RemoveBoard(run);
  if (!synced) return false;
  // After the fsync: a crash before it could restore the names with the old checkpoint half
  // removed.
  if (old[0] != '\0') DisposeOf(run, old);
  return true;
}

bool CommitDirectory(JobRun* run) {
  HOLDFAST_ASSERT(run->staging_released && !run->committed);
  HOLDFAST_ASSERT(run->manifest_named || !run->Has(layout::kWriteManifest));
  SetPhase(run, layout::Phase::kCommitting);
  // The last moment at which a cancel takes effect.
  if (MustStop(run, true) || !AnnounceCommit(run)) return false;
  // The lock keeps other saves from replacing this checkpoint until the name was checked again.
  int lock = -1;
  LockManifest(run->directory, run->job->manifest, &lock);
  char old[kNameBytes];
  Try outcome = TakeName(run, old);
  const uint64_t end_ns = sys::NowNs() + DeadlineNs(run->job->time_stalled_max_ns);
  while (outcome == Try::kAgain && !MustStop(run, true)) {
    if (sys::NowNs() > end_ns) {
      Fail(run, FailureCode::kDeadlineExceeded, Operation::kReplace);
      break;
    }
    SleepUntilRung(run, kReplaceSleepMs);
    outcome = TakeName(run, old);
  }
  const bool kept = outcome == Try::kDone && KeepName(run, old);
  if (lock >= 0) sys::CloseOwned(lock);
  return kept;
}

/// The end of a wait without an answer from rank 0.
bool GiveUp(JobRun* run) {
  if (TargetIsOurs(run)) {
    run->committed = true;
    return SyncParent(run);
  }
  return FailAsSeen(run);
}

/// Asks rank 0 to stop, by a failure that is not final, when a voted rank must stop. The rank's
/// files are in rank 0's hands until rank 0 has answered.
void TakeVoteBack(JobRun* run) {
  HOLDFAST_ASSERT(run->voted);
  const Failure before = run->failure;
  if (!run->ranks.left && MustStop(run, true)) LeaveRanks(run);
  run->failure = before;
}

/// Other ranks: wait for rank 0's decision.
bool WaitForDecision(JobRun* run) {
  HOLDFAST_ASSERT(!run->Decides() && run->voted);
  RankWait waiting(run);
  while (true) {
    switch (LookAtRanks(run)) {
      case Sight::kCommitted:
        run->committed = true;
        return SyncParent(run);
      case Sight::kFailure:
        if (run->ranks.seen.is_final != 0) {
          // No commit is possible any more, so these files belong to this rank again.
          run->voted = false;
          return FailAsSeen(run);
        }
        // A failure of a rank other than 0 that is not final: rank 0 sees it and answers.
        if (run->ranks.found_here || run->ranks.said_by == 0) return GiveUp(run);
        break;
      case Sight::kNothing:
        break;
    }
    TakeVoteBack(run);
    if (!waiting.Continue(0)) return GiveUp(run);
  }
}

}  // namespace

bool Commit(JobRun* run) {
  if (run->Has(layout::kSingleFile)) return CommitSingleFile(run) && SyncParent(run);
  if (run->Has(layout::kFilesOnly)) {
    // The names are durable already; the framework's own last file commits. The directory's entry
    // too, or "durable" could name a place that a crash takes away.
    run->committed = true;
    return SyncParent(run);
  }
  SetPhase(run, layout::Phase::kWaitingForRanks);
  if (run->Decides())
    return WaitForVotes(run) && WriteCommitRecord(run) && KeepVotes(run) &&
           CheckWrittenFiles(run) && CommitDirectory(run);
  return WaitForDecision(run);
}

bool TargetIsOurs(JobRun* run) {
  const int directory = sys::OpenOwned(run->parent, run->job->target,
                                       O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (directory < 0) return false;
  int error = 0;
  const bool ours = FindManifest(*run, directory, run->job->manifest, &error) == Found::kYes;
  sys::CloseOwned(directory);
  return ours;
}

}  // namespace holdfast::worker
