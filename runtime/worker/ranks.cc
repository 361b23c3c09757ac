#include "runtime/worker/ranks.h"

#include <fcntl.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/commit.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/manifest.h"
#include "runtime/worker/planted_bugs.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_leave_ranks_silently = false;
bool g_never_look_at_place = false;
bool g_never_miss_a_rank = false;
}  // namespace testing
#endif

namespace {

using layout::RankFailureKind;
using layout::RankState;

constexpr uint64_t kLivenessDefaultNs = 30 * sys::kNsPerSecond;
// A failure is seen after one look; the promised bound is two seconds.
constexpr uint64_t kLookNs = sys::kNsPerSecond;
// Two of three signs of life may be lost, or late.
constexpr uint64_t kBeatsPerLiveness = 3;
// A fenced rank 0 stops within a second.
constexpr uint64_t kPlaceNs = sys::kNsPerSecond / 2;

uint64_t LookEvery(const layout::Job& job) {
  const uint64_t beat = LivenessNs(job) / (2 * kBeatsPerLiveness);
  return beat < kLookNs ? beat : kLookNs;
}

uint32_t NoteCount(const JobRun& run) { return run.Decides() ? run.job->world_size : 1; }

/// Other ranks may have been stopped together with this process, and their signs of life come
/// later.
void ForgiveGap(JobRun* run, uint64_t now) {
  RankWatch& watch = run->ranks;
  const uint64_t half = LivenessNs(*run->job) / 2;
  const uint64_t gap =
      watch.gap.Round(now, half < sys::OwnGap::kLeastNs ? half : sys::OwnGap::kLeastNs);
  if (gap == 0) return;
  HOLDFAST_ASSERT(watch.notes != nullptr);
  for (uint32_t i = 0; i < NoteCount(*run); ++i) {
    sys::OwnGap::Forgive(gap, now, &watch.notes[i].changed_ns);
  }
  if (watch.waiting_since_ns != 0) sys::OwnGap::Forgive(gap, now, &watch.waiting_since_ns);
}

RankState OwnState(const JobRun& run) { return run.voted ? RankState::kVoted : RankState::kJoined; }

void Beat(JobRun* run, uint64_t now) {
  RankWatch& watch = run->ranks;
  if (watch.left || now < watch.beat_at_ns) return;
  watch.beat_at_ns = now + LivenessNs(*run->job) / kBeatsPerLiveness;
  // The next beat repeats a failed write.
  (void)WritePulse(watch.board, Side::kWorker, OwnState(*run));
}

void Note(const layout::RankSlot& slot, uint64_t now, PulseNote* note) {
  // A changed heartbeat is dated by this process's clock.
  const uint64_t beats = slot.trainer.beat + slot.worker.beat;
  if (beats != note->beats) note->changed_ns = now;
  note->beats = beats;
  note->silent_s_max = slot.worker.silent_s_max;
  note->state = StateOf(slot);
}

Sight Found(JobRun* run, uint32_t rank, RankFailureKind kind, uint64_t ns) {
  RankWatch& watch = run->ranks;
  HOLDFAST_ASSERT(rank < run->job->world_size);
  watch.seen = layout::RankFailure{};
  watch.seen.rank = rank;
  watch.seen.kind = static_cast<uint32_t>(kind);
  watch.seen.seconds = static_cast<uint32_t>((ns + sys::kNsPerSecond / 2) / sys::kNsPerSecond);
  watch.said_by = run->job->rank;
  watch.found_here = true;
  return Sight::kFailure;
}

Sight Read(JobRun* run, uint32_t rank) {
  HOLDFAST_ASSERT(rank < run->job->world_size);
  run->ranks.seen = ReadFailure(run->ranks.board, rank);
  run->ranks.said_by = rank;
  run->ranks.found_here = false;
  return Sight::kFailure;
}

/// Reports whether a rank is gone. A vote counts also where the rank's worker could not publish it,
/// and not where a recovery has removed the manifest of a dead rank.
Sight Miss(JobRun* run, uint32_t rank, uint64_t now, PulseNote* note) {
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_never_miss_a_rank) return Sight::kNothing;
#endif
  RankWatch& watch = run->ranks;
  const uint64_t liveness = LivenessNs(*run->job);
  const bool absent = note->state == RankState::kAbsent;
  if (note->state == RankState::kFailed) return Sight::kNothing;
  // A rank may begin later. Its absence counts once this rank only waits.
  if (absent && watch.waiting_since_ns == 0) return Sight::kNothing;
  uint64_t allowed = liveness;
  if (!absent && note->silent_s_max * sys::kNsPerSecond > allowed) {
    allowed = note->silent_s_max * sys::kNsPerSecond;
  }
  const uint64_t since = absent ? watch.waiting_since_ns : note->changed_ns;
  if (now - since <= allowed) return Sight::kNothing;
  if (run->Decides() && HasVoted(*run, rank)) {
    // A silent vote is looked at once in a while, to bound the calls.
    if (note->state == RankState::kVoted) note->changed_ns = now;
    note->state = RankState::kVoted;
    return Sight::kNothing;
  }
  return Found(run, rank, absent ? RankFailureKind::kAbsent : RankFailureKind::kSilent, allowed);
}

/// Rank 0: reads all slots, some hundreds with each read.
Sight LookAtSlots(JobRun* run, uint64_t now) {
  HOLDFAST_ASSERT(run->Decides() && run->ranks.notes != nullptr);
  RankWatch& watch = run->ranks;
  auto* const slots = reinterpret_cast<layout::RankSlot*>(run->directory_buffer);
  constexpr uint32_t kAtOnce = kDirectoryBufferBytes / sizeof(layout::RankSlot);
  for (uint32_t first = 0; first < run->job->world_size; first += kAtOnce) {
    const uint32_t left = run->job->world_size - first;
    const uint32_t count = left < kAtOnce ? left : kAtOnce;
    // A slot that cannot be read counts as unchanged.
    HOLDFAST_ASSERT(first + count <= run->job->world_size);
    const bool read = ReadSlots(watch.board, first, count, slots);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t rank = first + i;
      PulseNote& note = watch.notes[rank];
      if (read) Note(slots[i], now, &note);
      if (note.state == RankState::kFailed) return Read(run, rank);
      if (rank != 0 && Miss(run, rank, now, &note) == Sight::kFailure) return Sight::kFailure;
    }
  }
  return Sight::kNothing;
}

/// Only rank 0 checks that the directory still has its partial name: one lookup for the whole job,
/// for any number of ranks.
Sight LookAtPlace(JobRun* run, uint64_t now) {
  RankWatch& watch = run->ranks;
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_never_look_at_place) return Sight::kNothing;
#endif
  if (now < watch.place_at_ns) return Sight::kNothing;
  watch.place_at_ns = now + kPlaceNs;
  // A look that failed shows nothing; the next one does, or the rename at the end.
  if (!MeansMoved(LeadsTo(run->parent, run->job->partial, run->directory))) return Sight::kNothing;
  watch.promoted = TargetIsOurs(run);
  return watch.promoted ? Sight::kNothing : Found(run, 0, RankFailureKind::kFenced, 0);
}

layout::RankFailure OwnFailure(const JobRun& run) {
  layout::RankFailure failure;
  failure.rank = run.job->rank;
  failure.kind = static_cast<uint32_t>(RankFailureKind::kFailed);
  failure.code = static_cast<int32_t>(run.failure.code);
  failure.operation = static_cast<uint32_t>(run.failure.operation);
  failure.error_number = run.failure.error_number;
  if (run.failure.operation == Operation::kWaitTrainer && run.job->staging_error[0] != '\0') {
    failure.is_message = 1;
    SetText(&failure, run.job->staging_error);
  } else if (run.failure.file < run.job->file_count) {
    SetText(&failure, layout::Files(run.job)[run.failure.file].name);
  }
  return failure;
}

FailureCode CodeOf(const RankWatch& watch) {
  const auto kind = static_cast<RankFailureKind>(watch.seen.kind);
  const bool waited = kind != RankFailureKind::kFenced && kind != RankFailureKind::kDiffers;
  return watch.found_here && waited ? FailureCode::kDeadlineExceeded : layout::CodeFor(watch.seen);
}

/// Opens the board of a rank that failed before it opened the partial directory.
bool OpenToLeave(JobRun* run) {
  const layout::Job& job = *run->job;
  if (run->directory < 0 && LeadsTo(run->parent, job.partial, run->lock) == 0) {
    run->directory =
        sys::OpenOwned(run->lock, ".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  }
  return run->directory >= 0 &&
         OpenBoard(run->directory, job.attempt, job.rank, job.world_size, &run->ranks.board) == 0;
}

}  // namespace

uint64_t LivenessNs(const layout::Job& job) {
  return job.time_liveness_max_ns != 0 ? job.time_liveness_max_ns : kLivenessDefaultNs;
}

uint64_t RankNoteBytes(const layout::Job& job) {
  return (job.rank == 0 ? uint64_t{job.world_size} : 1) * sizeof(PulseNote);
}

bool JoinRanks(JobRun* run) {
  if (!run->HasRanks()) return true;
  const layout::Job& job = *run->job;
  RankWatch& watch = run->ranks;
  HOLDFAST_ASSERT(!watch.board.is_open() && watch.notes != nullptr);
  const int error = OpenBoard(run->directory, job.attempt, job.rank, job.world_size, &watch.board);
  // Ranks of two jobs, or of two builds, in one directory: a mistake in the launch of the ranks.
  if (error == EPROTO) return Fail(run, FailureCode::kFailedPrecondition, Operation::kJoinRanks);
  if (error != 0) return FailErrno(run, Operation::kJoinRanks, error);
  if (!WritePulse(watch.board, Side::kWorker, RankState::kJoined)) {
    return FailErrno(run, Operation::kJoinRanks, errno);
  }
  const uint64_t now = sys::NowNs();
  for (uint32_t i = 0; i < NoteCount(*run); ++i) watch.notes[i] = PulseNote{.changed_ns = now};
  watch.beat_at_ns = now + LivenessNs(job) / kBeatsPerLiveness;
  return !RanksHaveFailed(run);
}

bool RanksHaveFailed(JobRun* run) {
  RankWatch& watch = run->ranks;
  if (!watch.board.is_open() || run->voted) return false;
  const uint64_t now = sys::NowNs();
  ForgiveGap(run, now);
  if (now < watch.look_at_ns) return false;
  watch.look_at_ns = now + LookEvery(*run->job);
  if (LookAtRanks(run) != Sight::kFailure) return false;
  return !FailAsSeen(run);
}

Sight LookAtRanks(JobRun* run) {
  RankWatch& watch = run->ranks;
  HOLDFAST_ASSERT(watch.board.is_open());
  const uint64_t now = sys::NowNs();
  ForgiveGap(run, now);
  Beat(run, now);
  if (run->Decides()) {
    if (LookAtPlace(run, now) == Sight::kFailure) return Sight::kFailure;
    return LookAtSlots(run, now);
  }
  layout::BoardTop top;
  if (ReadTop(watch.board, &top)) {
    if (top.decision.decision == static_cast<uint32_t>(layout::Decision::kCommitted)) {
      return Sight::kCommitted;
    }
    Note(top.rank_zero, now, &watch.notes[0]);
    // Rank 0's failure first, because rank 0 decides.
    if (watch.notes[0].state == RankState::kFailed) return Read(run, 0);
    // Next rank 0's absence: a voted rank leaves failures of other ranks to rank 0.
    if (Miss(run, 0, now, &watch.notes[0]) == Sight::kFailure) return Sight::kFailure;
    const uint32_t failed = top.alarm.failed;
    if (failed != 0 && failed <= run->job->world_size) return Read(run, failed - 1);
    return Sight::kNothing;
  }
  return Miss(run, 0, now, &watch.notes[0]);
}

void BeginWaiting(JobRun* run) {
  RankWatch& watch = run->ranks;
  HOLDFAST_ASSERT(watch.waiting_since_ns == 0);
  HOLDFAST_ASSERT(run->staging_released);
  watch.waiting_since_ns = sys::NowNs();
  watch.beat_at_ns = 0;  // the vote is published at once
}

bool FailAsSeen(JobRun* run) {
  const RankWatch& watch = run->ranks;
  HOLDFAST_ASSERT(watch.seen.rank < run->job->world_size);
  run->job->completion.rank_failure = watch.seen;
  return Fail(run, CodeOf(watch), Operation::kWaitRanks);
}

void LeaveRanks(JobRun* run) {
  RankWatch& watch = run->ranks;
  if (!run->HasRanks() || run->committed || watch.left || run->ok()) return;
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_leave_ranks_silently) return;
#endif
  if (!watch.board.is_open() && !OpenToLeave(run)) return;
  const bool others = run->failure.operation == Operation::kWaitRanks;
  layout::RankFailure failure = others ? watch.seen : OwnFailure(*run);
  failure.is_final = run->voted ? 0 : 1;
  const bool raise = !others || watch.found_here || run->Decides();
  watch.left = WriteFailure(watch.board, Side::kWorker, failure, raise);
}

void BeginSilence(JobRun* run) {
  if (!run->ranks.board.is_open() || run->ranks.left || !TrainerIsDead(run)) return;
  const uint64_t seconds = DeadlineNs(run->job->time_stalled_max_ns) / sys::kNsPerSecond + 1;
  (void)WritePulse(run->ranks.board, Side::kWorker, OwnState(*run), static_cast<uint32_t>(seconds));
}

void EndSilence(JobRun* run) {
  if (!run->ranks.board.is_open() || run->ranks.left || !run->trainer_died) return;
  (void)WritePulse(run->ranks.board, Side::kWorker, OwnState(*run));
}

}  // namespace holdfast::worker
