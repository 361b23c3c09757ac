// The state of one job: of fixed size, laid out before the job starts, passed to every step.
//
// A step is a function `bool Step(JobRun*)`: true, or false with the first failure recorded in
// `failure`. Later failures (of the cleaning up) never replace it.
#ifndef HOLDFAST_RUNTIME_WORKER_JOB_RUN_H_
#define HOLDFAST_RUNTIME_WORKER_JOB_RUN_H_

#include <cstdint>

#include "holdfast/pod.h"
#include "io_uring/queue.h"
#include "runtime/layout/board.h"
#include "runtime/layout/job.h"
#include "runtime/sys/own_gap.h"
#include "runtime/worker/rank_board.h"

namespace holdfast::worker {

struct Server;

inline constexpr uint32_t kOpenFilesMax = 64;
/// Maximum number of written extents without a digest; no further write is submitted beyond.
inline constexpr uint32_t kUndigestedMax = 2 * io::kDepthMax;
inline constexpr uint32_t kDirectoryBufferBytes = 32 * 1024;
/// Used where the table gives no deadline, so that every wait is bounded.
inline constexpr uint64_t kDeadlineDefaultNs = 600ull * 1'000'000'000;

/// The contents of kAttach. `arena` is null for a worker that only deletes.
struct Attachment {
  int arena_fd = -1;
  int trainer = -1;           ///< A pidfd, or a socket that hangs up with the trainer's death.
  int doorbell = -1;          ///< eventfd, rung by the trainer
  int trainer_doorbell = -1;  ///< eventfd, rung here
  char* arena = nullptr;
  uint64_t arena_bytes = 0;
  bool huge_pages = false;
  bool writable = false;  ///< Mapped for writing, as registration requires.
};

/// A file as statx(2) sees it.
struct FileIdentity {
  uint64_t inode = 0;        ///< 0: not known.
  uint64_t stamp_ns = 0;     ///< Time of birth, else of the last change.
  uint64_t modified_ns = 0;  ///< Of the last write or truncation.
  uint64_t bytes = 0;
};

/// State of one file of the save; the array is as long as the file table.
struct FileNote {
  static constexpr uint16_t kNoSlot = 0xffff;
  uint32_t extents_left = 0;  ///< Not yet completed.
  uint16_t slot = kNoSlot;    ///< In JobRun::open.
  uint8_t created = 0;        ///< NAME.tmp may exist and is ours.
  uint8_t synced = 0;         ///< Complete, truncated, fsynced, closed; or not written here.
  uint8_t renamed = 0;        ///< Has its final name.
  uint8_t buffered = 0;       ///< The file system has refused a direct write.
  // At the last close; before the first close the inode alone, in a framework's directory. An
  // inode number identifies a file only while the file is open: ext4 reuses the number at once.
  FileIdentity identity;
};

struct OpenFile {
  int fd = -1;
  uint32_t file = 0;
  uint32_t in_flight = 0;
  DirectIo direct = DirectIo::kNo;
};

struct InFlight {
  uint32_t extent = 0;
  uint16_t slot = 0;
  bool direct = false;  ///< Submitted to a file with O_DIRECT.
};

/// The write loop's own state.
struct WriteState {
  layout::LogReader published;
  layout::LogWriter acknowledged;
  uint64_t* taken_bits = nullptr;  ///< One bit per extent; no extent is written twice.
  InFlight in_flight[io::kDepthMax];
  uint64_t in_flight_used = 0;  ///< One bit per entry.
  uint32_t undigested[kUndigestedMax] = {};
  uint32_t undigested_first = 0;
  uint32_t undigested_count = 0;
  uint32_t next_extent = 0;  ///< Taken from the log, not yet submitted.
  bool has_next = false;
  uint32_t proven = 0;       ///< Extents written and re-digested.
  uint64_t progress_ns = 0;  ///< When something was last published or completed.
  sys::OwnGap gap;
  uint32_t memory_waits = 0;  ///< Of the job's, as last seen.
  uint64_t allowed_ns = 0;    ///< The byte-rate limit lets the next write start then.
  uint64_t rang_ns = 0;
};

/// The last observation of another rank on the board.
struct PulseNote {
  uint64_t beats = 0;
  uint64_t changed_ns = 0;  ///< On this process's clock alone.
  uint32_t silent_s_max = 0;
  layout::RankState state = layout::RankState::kAbsent;
};

/// This worker's part in a save of several ranks: see ranks.h.
struct RankWatch {
  RankBoard board;
  PulseNote* notes = nullptr;  ///< At rank 0 one per rank, elsewhere only of rank 0.
  uint64_t look_at_ns = 0;     ///< When the next look at the board is due; likewise below.
  uint64_t beat_at_ns = 0;
  uint64_t place_at_ns = 0;
  uint64_t waiting_since_ns = 0;  ///< 0: this rank still works on its own part.
  sys::OwnGap gap;
  layout::RankFailure seen;  ///< Why the save cannot go on.
  uint32_t said_by = 0;      ///< The rank in whose slot `seen` stands.
  bool found_here = false;   ///< `seen` is this rank's own finding and is not on the board yet.
  bool promoted = false;     ///< Rank 0: a recovery has given the directory its final name.
  bool left = false;         ///< This rank's failure is on the board.
};

struct JobRun {
  // Given.
  Server* server = nullptr;
  layout::Job* job = nullptr;
  const Attachment* attached = nullptr;
  io::Queue* queue = nullptr;       ///< Open for a save.
  io::Queue* read_queue = nullptr;  ///< Closed until read-back opens the queue.
  char* directory_buffer = nullptr;
  Launcher launcher = Launcher::kSpawn;
  int parent = -1;
  int lock = -1;  ///< The flock lasts while any copy of the descriptor is open.

  // Found on the way.
  Failure failure;
  RankWatch ranks;
  int directory = -1;  ///< Where the files are written.
  FileNote* notes = nullptr;
  void* scratch = nullptr;  ///< The mapping of `notes`, `taken_bits` and `ranks.notes`.
  uint64_t scratch_bytes = 0;
  bool trainer_died = false;
  bool all_sealed = false;     ///< Every extent was published: the trainer is not needed any more.
  bool manifest_made = false;  ///< MANIFEST.tmp may exist and is ours.
  bool manifest_named = false;
  bool record_made = false;  ///< The commit record's .tmp may exist and is ours.
  bool record_named = false;
  bool voted = false;      ///< Another rank decides now; see commit.h.
  bool committed = false;  ///< The final name stands: nothing is removed any more.
  bool io_stuck = false;   ///< Transfers did not end within the deadline.
  bool staging_released = false;

  OpenFile open[kOpenFilesMax];
  WriteState write;

  WorkerFigures figures;  ///< `engine` is kAuto until the queue was opened.
  bool opened_any = false;
  uint64_t time_syncing_ns = 0;
  layout::JobTimes times;

  bool ok() const { return failure.ok(); }
  bool Has(layout::JobFlags flag) const { return (job->flags & flag) != 0; }
  /// Returns true for rank 0, the rank that decides; a job of one rank is rank 0.
  bool Decides() const { return job->rank == 0; }
  /// Returns false for a replicated file, which rank 0 writes and this rank only compares.
  bool Writes(uint32_t file) const { return layout::WritesFile(*job, layout::Files(job)[file]); }
  /// Returns true when other ranks write into the same directory and commit with this rank.
  bool HasRanks() const {
    return job->kind == layout::JobKind::kSave && job->world_size > 1 && !Has(layout::kFilesOnly);
  }
};

/// Records `failure` unless a failure is recorded already. Returns false.
bool Fail(JobRun* run, const Failure& failure);
bool Fail(JobRun* run, FailureCode code, Operation operation, uint32_t file = Failure::kNoIndex);
bool FailErrno(JobRun* run, Operation operation, int error_number,
               uint32_t file = Failure::kNoIndex, uint64_t offset = 0, uint64_t bytes = 0);

void SetPhase(JobRun* run, layout::Phase phase);

/// Counts a step of work other than writing, for the trainer's stall deadline.
void CountStep(layout::Job* job);

/// Wakes the trainer's supervisor: progress, acknowledgments, the end.
void RingTrainer(const Attachment& attached);

/// Empties this worker's readable doorbell.
void HearDoorbell(const Attachment& attached);

/// Looks whether the trainer has died.
bool TrainerIsDead(JobRun* run);

/// Whether the job must end now: cancelled, given up by the trainer, orphaned without leave to
/// finish, or in vain because another rank has failed. Records why. Looks at the trainer's pidfd
/// only if `look` is set (the write loop watches it in its queue).
bool MustStop(JobRun* run, bool look);

/// Handles a dead trainer as MustStop does.
void NoteTrainerDeath(JobRun* run);

/// Sleeps up to `timeout_ms`, woken by the doorbell and by the trainer's death.
void SleepUntilRung(JobRun* run, int timeout_ms);

/// Returns the deadline of the table, or the default.
inline uint64_t DeadlineNs(uint64_t from_table) {
  return from_table != 0 ? from_table : kDeadlineDefaultNs;
}

/// Writes `name` + ".tmp" to `out`; ValidateJob has checked the length.
void TemporaryName(const char* name, char (&out)[kNameBytes]);

/// Writes the name of a file before its commit to `out`.
void TemporaryOf(const JobRun& run, uint32_t file, char (&out)[kNameBytes]);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_JOB_RUN_H_
