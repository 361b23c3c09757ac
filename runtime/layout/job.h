// The job table: the input and the result of a worker's job for one save.
//
// One table per save, in its own memfd (the control memory). The trainer lays out and fills the
// table before the worker attaches; afterwards each field has one writer, named beside the field.
// Offsets count from the table's first byte. Below the fork line: plain data and lock-free atomics,
// no code that allocates.
#ifndef HOLDFAST_RUNTIME_LAYOUT_JOB_H_
#define HOLDFAST_RUNTIME_LAYOUT_JOB_H_

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "holdfast/pod.h"
#include "runtime/layout/board.h"

namespace holdfast::layout {

inline constexpr uint64_t kJobMagic = 0x3142'4f4a'5446'4c48;  // "HLFTJOB1" in memory
/// Raised with every change of a struct in this file or of a message in wire.h; both sides refuse
/// any other.
inline constexpr uint32_t kLayoutVersion = 17;

using SharedU32 = std::atomic<uint32_t>;
using SharedU64 = std::atomic<uint64_t>;
static_assert(SharedU32::is_always_lock_free && SharedU64::is_always_lock_free);

/// Rank 0's commit record, in the directory of a checkpoint (FORMAT.md, section 5).
inline constexpr char kCommitRecordName[] = "holdfast.commit.json";

enum class JobKind : uint32_t {
  kSave = 1,    ///< Write extents, prove them, commit.
  kDelete = 2,  ///< Remove retired checkpoint directories, crash-safely and in steps.
};

enum JobFlags : uint32_t {
  /// Exchange an existing target for the new checkpoint, then remove it; otherwise an existing
  /// target is an error.
  kReplaceExisting = 1u << 0,
  /// Read every chunk back (O_DIRECT where proven) and compare the bytes on disk.
  kReadBack = 1u << 1,
  /// If the trainer dies after the last seal, finish; otherwise stop and clean up.
  kFinishWithoutTrainer = 1u << 2,
  /// A framework owns the directory: commit files one by one; make and rename no directory.
  kFilesOnly = 1u << 3,
  /// Do not use O_DIRECT.
  kBuffered = 1u << 4,
  /// Write and fsync a rank manifest after the files.
  kWriteManifest = 1u << 7,
  /// With kFilesOnly: the name of the file is `partial` until the manifest is durable. The rename
  /// of the file commits the save.
  kSingleFile = 1u << 8,
  /// Inode numbers and times of modification identify the files of this file system for good.
  kStableInodes = 1u << 9,
};

/// A run of bytes within the table.
struct Range {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

/// A fixed-width place in the manifest template. `offset` counts from the manifest's first byte;
/// `width` 0 is "none".
struct Slot {
  uint64_t offset = 0;
  uint32_t width = 0;
  uint32_t padding = 0;
};

/// One contiguous run of bytes: arena offset to file offset. Never longer than kChunkBytes; extent
/// k of a file is its chunk k, so the digest of an extent is the digest of a chunk.
struct Extent {
  // Written by the trainer before the job starts.
  uint64_t file_offset = 0;
  uint32_t file = 0;
  uint32_t bytes =
      0;  // true length; the I/O length is this rounded up to kIoAlignment, the rest is zero
  uint32_t piece_first = 0;  // the tensors (or parts) inside, by offset
  uint32_t piece_count = 0;
  uint64_t digest_slot = 0;  // manifest offset of the 32 hex digits of `sealed`; 0 is none
  // Written by the trainer (a sealer) before the extent's index is published.
  uint64_t arena_offset = 0;  // of the lease, a multiple of kIoAlignment
  Digest sealed;
};

/// A part of a tensor inside one extent. A tensor that fills a chunk alone has one piece, as long
/// as the chunk.
struct Piece {
  uint32_t tensor = Failure::kNoIndex;  // kNoIndex: header or framing bytes
  uint32_t offset = 0;                  // within the extent
  uint32_t bytes = 0;
  uint32_t has_digest = 0;  // 1: `digest` is taken at seal (the piece is not the whole extent)
  Digest digest;            // written by the sealer
};

/// One file of the save.
struct File {
  // Written by the trainer before the job starts.
  char name[kNameBytes] = {};  // relative to the checkpoint directory, a single component
  uint64_t bytes = 0;
  uint32_t extent_first = 0;
  uint32_t extent_count = 0;
  uint64_t root_slot = 0;   // in the manifest; 0 is none
  uint32_t replicated = 0;  // 1: all ranks have these bytes; see WritesFile
  uint32_t padding = 0;
  // Written by the worker.
  Digest root;
};

/// Template places of the manifest fields that the worker fills.
struct ManifestSlots {
  Slot engine;  // JSON string and blanks
  Slot engine_reason;
  Slot direct_io;
  Slot streamed;  // true or false and blanks
  Slot bytes_written;
  Slot time_writing_ns;
  Slot time_syncing_ns;
  Slot time_total_ns;
  Slot replicas;     // 32 hex digits, of the replicated files; width 0: there is no such file
  Slot self_digest;  // 32 hex digits, over all bytes of the file before them
};

/// Template places of the commit record's fields that rank 0's worker fills. The row of rank r
/// begins r * row_bytes after rank 0's.
struct CommitSlots {
  Slot committed_at_ns;
  Slot bytes;                    // of all ranks' files
  Slot manifest_bytes;           // of rank 0's manifest
  uint64_t manifest_digest = 0;  // of rank 0's manifest: where its 32 hex digits go
  uint64_t row_bytes = 0;
  Slot self_digest;
};

/// Times of one job in the worker, CLOCK_MONOTONIC, in nanoseconds. 0: not reached.
struct JobTimes {
  uint64_t started = 0;
  uint64_t first_submit = 0;
  uint64_t last_complete = 0;
  uint64_t data_synced = 0;
  uint64_t manifest_synced = 0;
  uint64_t committed = 0;
  uint64_t cpu = 0;  // CPU time of the worker for this job, not a point in time
};

enum class CompletionState : uint32_t {
  kEmpty = 0,  ///< No result: a worker that is gone has failed.
  kDone = 1,   ///< `failure` is the result; other fields are filled as far as known.
};

/// Use of staged bytes after their write, while the job runs. Decided once, by the first Claim.
enum class Written : uint32_t {
  kHeld = 0,   ///< Undecided: held to the job's end.
  kReleased,   ///< The save streams: the trainer releases bytes on acknowledgment.
  kRewritten,  ///< The worker writes the bytes once more; held to the job's end.
};

/// Phase of a job, for progress displays.
enum class Phase : uint32_t {
  kQueued = 0,
  kWriting,
  kSyncing,
  kReadingBack,
  kWritingManifest,
  kWaitingForRanks,
  kCommitting,
  kRemoving,
  kDone,
};

/// Written once, by the worker only; `state` is stored last (release) and read first (acquire).
struct CompletionSlot {
  SharedU32 state{0};
  uint32_t padding = 0;
  Failure failure;
  WorkerFigures figures;
  uint32_t left_files = 0;  // 1: written files could not be removed
  JobTimes times;
  char reason[160] = {};     // reason for the rung
  RankFailure rank_failure;  // with Operation::kWaitRanks: failed rank and reason
  // Name of the replaced checkpoint, removed by the trainer; empty: none.
  char left_behind[kNameBytes] = {};
  // A foreign entry that prevents replacing or removing a directory; empty: no such entry.
  char foreign[kNameBytes] = {};
  // The later save that superseded this save; zero: no such save.
  AttemptId newer;
  uint64_t newer_step = 0;
};

/// The table's head. Offsets are 64-byte aligned.
struct Job {
  // Written by the trainer before the job starts.
  uint64_t magic = kJobMagic;
  uint32_t layout_version = kLayoutVersion;
  JobKind kind = JobKind::kSave;
  uint64_t table_bytes = 0;
  uint32_t flags = 0;
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;
  uint32_t queue_depth = 8;  // writes in flight at most
  uint32_t pwrite_threads = 2;
  uint32_t umask = 022;  // the trainer's
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  char target[kNameBytes] = {};    // final directory name, relative to the parent directory fd
  char partial[kNameBytes] = {};   // name of the directory, or single file, during the write
  char manifest[kNameBytes] = {};  // this rank's manifest file name
  // The manifest of rank r is `manifest_prefix` + five digits of r + `manifest_suffix`; rank 0
  // waits for every rank's manifest.
  char manifest_prefix[32] = {};
  char manifest_suffix[64] = {};
  Qos qos;
  uint64_t time_stalled_max_ns = 0;   // limit without completion or seal
  uint64_t time_ranks_max_ns = 0;     // longest wait for a live rank
  uint64_t time_liveness_max_ns = 0;  // a rank silent for this long has failed
  uint32_t file_count = 0;
  uint32_t extent_count = 0;
  uint32_t piece_count = 0;
  uint32_t tensor_count = 0;
  Range files;              // File[file_count]
  Range extents;            // Extent[extent_count]
  Range pieces;             // Piece[piece_count]
  Range published;          // SharedU32[extent_count]: the log of sealed extents, see PublishLog
  Range acknowledged;       // SharedU32[extent_count]: the log of extents whose bytes are reusable
  Range manifest_template;  // the manifest's bytes, there before the last extent is published
  Range older;              // AttemptId[n]: what a replacing save may take the place of
  Range trash;              // char[kNameBytes][n]: directories that a kDelete job removes
  ManifestSlots slots;
  Range commit_template;  // the commit record's bytes; empty: no record is written
  CommitSlots commit_slots;

  // Written by either side while the job runs, once.
  SharedU32 written{0};  // Written

  // Written by the trainer while the job runs.
  SharedU32 cancel{0};  // 1: stop and remove written files. Read by the worker, relaxed + doorbell
  SharedU32 trainer_failed{0};  // 1: staging failed, no extent follows; clean up
  // Reason for the other ranks, written once, before `trainer_failed`.
  char staging_error[sizeof(RankFailure::text)] = {};
  // 1: the save has ended. Its staging memory is held until its last transfer has landed.
  SharedU32 quarantined{0};
  SharedU64 published_count{0};  // hint for progress; the log itself is authoritative
  SharedU32 memory_waits{0};     // looks for staging memory that earlier saves still hold

  // Written by the worker while the job runs (progress; relaxed).
  SharedU32 phase{0};
  SharedU32 worker_pid{0};
  SharedU64 bytes_completed{0};
  SharedU64 steps{0};        // files synced, chunks read back, directory entries removed
  SharedU32 engine_used{0};  // EngineRung, before the first transfer; kAuto: no engine was opened
  // 1 (release): every transfer of the job has ended and none follows. The worker no longer reads
  // or writes staging memory.
  SharedU32 staging_released{0};
  // 1 (release): an assertion of the worker failed; `completion.reason` is its text. No result
  // follows.
  SharedU32 assertion_failed{0};

  CompletionSlot completion;
};

static_assert(std::is_trivially_copyable_v<Extent> && std::is_trivially_copyable_v<Piece>);
static_assert(std::is_trivially_copyable_v<File> && std::is_standard_layout_v<Job>);
static_assert(sizeof(Extent) == 56 && sizeof(Piece) == 32 && sizeof(Slot) == 16);

/// A log entry that is not yet written.
inline constexpr uint32_t kEmptyEntry = 0xffffffffu;

/// Decides the use of written bytes. Returns false after a different decision.
inline bool Claim(Job* job, Written what) {
  uint32_t found = static_cast<uint32_t>(Written::kHeld);
  const auto wanted = static_cast<uint32_t>(what);
  return job->written.compare_exchange_strong(found, wanted, std::memory_order_acq_rel) ||
         found == wanted;
}
inline bool Streams(const Job& job) {
  return job.written.load(std::memory_order_acquire) == static_cast<uint32_t>(Written::kReleased);
}

/// Typed views of a mapped table, unchecked: ValidateJob has checked the table once.
template <typename T>
T* At(Job* job, Range range) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(job) + range.offset);
}
inline File* Files(Job* job) { return At<File>(job, job->files); }
inline Extent* Extents(Job* job) { return At<Extent>(job, job->extents); }
inline Piece* Pieces(Job* job) { return At<Piece>(job, job->pieces); }
inline AttemptId* Older(Job* job) { return At<AttemptId>(job, job->older); }
/// Returns true when the attempt stood under the name, or was under way, at the time of the save's
/// request.
inline bool IsOlder(Job* job, const AttemptId& attempt) {
  const AttemptId* const older = Older(job);
  for (uint64_t i = 0; i < job->older.bytes / sizeof(AttemptId); ++i) {
    if (older[i] == attempt) return true;
  }
  return false;
}
inline char* CommitRecord(Job* job) { return At<char>(job, job->commit_template); }
inline char* Manifest(Job* job) { return At<char>(job, job->manifest_template); }

/// Returns true when this rank writes the file. Rank 0 writes a replicated file; every other rank
/// only proves its staged bytes, and rank 0 compares their digests at the commit.
inline bool WritesFile(const Job& job, const File& file) {
  return file.replicated == 0 || job.rank == 0;
}

/// Returns a number that changes with any progress of either side. For stall deadlines.
inline uint64_t Progress(const Job& job) {
  return job.published_count.load(std::memory_order_relaxed) +
         job.bytes_completed.load(std::memory_order_relaxed) +
         job.steps.load(std::memory_order_relaxed) + job.phase.load(std::memory_order_relaxed) +
         job.worker_pid.load(std::memory_order_relaxed);
}

/// Checks every range, count and index of a table of `mapped_bytes` before first use. Returns
/// nullptr if sound, otherwise a static string with the reason.
const char* ValidateJob(const Job* job, uint64_t mapped_bytes);

/// An append-only log of extent indices in shared memory: many writers on one side, one reader on
/// the other.
///
/// Entry i goes from kEmptyEntry to its value once. A writer reserves i by `next_` (process-local,
/// so that a log has all its writers in one process), then stores the index with release. The
/// reader's acquire load of entry i therefore sees every earlier write to that extent.
class LogWriter {
 public:
  LogWriter() = default;
  LogWriter(SharedU32* entries, uint32_t capacity) : entries_(entries), capacity_(capacity) {}
  /// Attaches the log, before the first Append.
  void Reset(SharedU32* entries, uint32_t capacity) {
    entries_ = entries;
    capacity_ = capacity;
  }
  void Append(uint32_t index) {
    const uint32_t at = next_.fetch_add(1, std::memory_order_relaxed);
    if (at < capacity_) entries_[at].store(index, std::memory_order_release);
  }

 private:
  SharedU32* entries_ = nullptr;
  uint32_t capacity_ = 0;
  std::atomic<uint32_t> next_{0};
};

class LogReader {
 public:
  LogReader() = default;
  LogReader(const SharedU32* entries, uint32_t capacity) : entries_(entries), capacity_(capacity) {}
  /// Returns the next index, if written.
  bool Next(uint32_t* index) {
    if (next_ >= capacity_) return false;
    const uint32_t value = entries_[next_].load(std::memory_order_acquire);
    if (value == kEmptyEntry) return false;
    ++next_;
    *index = value;
    return true;
  }
  uint32_t taken() const { return next_; }

 private:
  const SharedU32* entries_ = nullptr;
  uint32_t capacity_ = 0;
  uint32_t next_ = 0;
};

}  // namespace holdfast::layout

#endif  // HOLDFAST_RUNTIME_LAYOUT_JOB_H_
