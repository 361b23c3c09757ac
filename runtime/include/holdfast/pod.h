// Plain-old-data types shared by both sides of the fork line.
//
// Each type is trivially copyable and has the same bytes in every process of one build. The header
// needs only the standard library, so that code in a forked child can include it.
#ifndef HOLDFAST_POD_H_
#define HOLDFAST_POD_H_

#include <cstdint>

namespace holdfast {

/// Bytes per digest: files are digested in chunks of this size; the last chunk may be shorter.
///
/// 4 MiB is one request to the block layer from 2 MiB pages and is deep enough in the flat part of
/// every disk's curve. A chunk is also small enough for a fault report to name a useful range.
inline constexpr uint32_t kChunkBytes = 4u << 20;

/// Alignment of every file offset, length and memory address of direct I/O, in bytes.
///
/// A multiple of all logical block sizes in use (512 and 4096). A file system that asks for a
/// larger alignment returns an error, and the engine falls back to buffered I/O.
inline constexpr uint32_t kIoAlignment = 4096;

/// Rounds up to a multiple of `alignment`, which need not be a power of two.
constexpr uint64_t AlignUp(uint64_t bytes, uint64_t alignment = kIoAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// Longest name of a file or directory, the terminating zero included (NAME_MAX + 1).
inline constexpr uint32_t kNameBytes = 256;

/// An XXH3-128 value. Text form: 32 lower-case hex digits, `high` first (xxHash's canonical order).
struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};

/// 128 random bits that name one attempt to save; equal on all ranks of one save. All zero is
/// "none".
struct AttemptId {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const AttemptId&, const AttemptId&) = default;
};

/// How the worker of a save is started.
enum class Launcher : uint32_t {
  kSpawn = 0,  ///< A helper program per save, by posix_spawn: the default.
  /// A forked child of this process per save. Costs about 10 ms per GiB of private memory.
  kFork = 1,
  kPersistent = 2,  ///< A spawned helper, kept between saves.
  kThread = 3,      ///< A thread of this process, where child processes are forbidden.
};

/// Write engines, best first. The worker takes the first rung that works and reports the reason.
enum class EngineRung : uint32_t {
  kAuto = 0,        ///< The best rung that works here.
  kUringFixed = 1,  ///< io_uring with registered buffers.
  kUring = 2,       ///< io_uring, plain.
  kPwrite = 3,      ///< pwrite(2) threads (one, synchronous, in a forked child).
};

/// Page kinds of the staging arena, best first.
enum class PageRung : uint32_t {
  kAuto = 0,
  kHugetlb = 1,  ///< memfd with MFD_HUGETLB: reserved huge pages.
  kTmpfsHuge =
      2,  ///< A file in a detached tmpfs with huge=always (needs CAP_SYS_ADMIN; cannot be sealed).
  kMadviseHuge = 3,  ///< memfd with MADV_HUGEPAGE (works where shmem_enabled is advise or always).
  kSmall = 4,        ///< memfd with base pages.
};

/// Whether writes bypass the page cache.
enum class DirectIo : uint32_t {
  kNo = 0,       ///< Buffered: the file system refuses O_DIRECT, or it was switched off.
  kClaimed = 1,  ///< O_DIRECT was accepted, but without proof that the page cache is bypassed.
  kProven = 2,   ///< STATX_DIOALIGN is reported, and a misaligned probe was refused.
};

/// Returns the word of an enumerator from a table in the enumerators' order. The first word stands
/// for a value out of range, which another process may have written.
template <typename Enum, uint32_t n>
constexpr const char* WordIn(const char* const (&words)[n], Enum value) {
  return words[static_cast<uint32_t>(value) < n ? static_cast<uint32_t>(value) : 0];
}

/// Words for launchers, engines, pages and direct I/O in manifests, reports, and on command lines.
constexpr const char* WordOf(Launcher launcher) {
  return WordIn({"spawn", "fork", "persistent", "thread"}, launcher);
}
constexpr const char* WordOf(EngineRung engine) {
  return WordIn({"auto", "io_uring-fixed", "io_uring", "pwrite"}, engine);
}
constexpr const char* WordOf(PageRung pages) {
  return WordIn({"auto", "hugetlb", "tmpfs-huge", "madvise-huge", "small"}, pages);
}
constexpr const char* WordOf(DirectIo direct_io) {
  return WordIn({"no", "claimed", "proven"}, direct_io);
}

/// The operation that failed; the verb of an error message.
enum class Operation : uint32_t {
  kNone = 0,
  kAttach,  ///< Mapping the arena or the job table.
  kSetUp,   ///< Opening a ring, starting a thread, applying QoS.
  kOpen,
  kReserve,  ///< fallocate(2)
  kWrite,
  kRead,
  kTruncate,
  kSync,  ///< fsync(2) of a file
  kSyncDirectory,
  kRename,
  kRemove,
  kDigest,  ///< A digest differs from the digest taken at seal.
  kManifest,
  kWaitTrainer,  ///< The trainer died or stopped sealing.
  kWaitRanks,    ///< Waiting for the other ranks; a rank has failed.
  kCancel,
  kLock,
  kReplace,    ///< Replacing an existing checkpoint of the name.
  kJoinRanks,  ///< Opening the rank board, or writing to it.
  kMapNotes,   ///< Mapping the worker's own memory of a job.
  kMapBuffer,  ///< Mapping the buffer that files are read back into.
};
inline constexpr Operation kLastOperation = Operation::kMapBuffer;

/// Why a job failed. The codes equal absl::StatusCode's, so that the trainer converts by value.
enum class FailureCode : int32_t {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
};

/// One failure in numbers; code below the fork line makes no text.
struct Failure {
  static constexpr uint32_t kNoIndex = 0xffffffffu;

  FailureCode code = FailureCode::kOk;
  Operation operation = Operation::kNone;
  int32_t error_number = 0;    ///< errno, 0 where none applies.
  uint32_t file = kNoIndex;    ///< Index into the job's file table.
  uint64_t offset = 0;         ///< Byte offset in that file.
  uint64_t bytes = 0;          ///< Length of the range at fault, 0 where none applies.
  uint32_t tensor = kNoIndex;  ///< Index of the tensor at fault, for digests.
  uint32_t padding = 0;
  Digest expected;  ///< Taken at seal.
  Digest found;     ///< Seen later.

  bool ok() const { return code == FailureCode::kOk; }
};

/// A worker's findings about one save: part of its result in shared memory, and of SaveReport.
struct WorkerFigures {
  uint64_t bytes_written = 0;  ///< Counted from completions.
  uint64_t worker_private_bytes_peak = 0;
  EngineRung engine = EngineRung::kAuto;
  DirectIo direct_io = DirectIo::kNo;
  /// 1, or 2 when an fsync failed and all files were written once more.
  uint32_t write_attempts = 0;
  bool space_reserved = false;  ///< fallocate(2) worked for every file.
};

/// Priorities and limits of a worker, applied by system calls in the worker itself. A setting that
/// the kernel refuses is left out and named in the report's `engine_reason`.
struct Qos {
  int32_t nice = 0;  ///< Added to the worker's nice value, 0 to 19.
  int32_t io_priority_class =
      0;  ///< IOPRIO_CLASS_*: 0 none, 1 realtime, 2 best effort, 3 idle (ioprio_set(2)).
  int32_t io_priority_level = 0;      ///< 0 (highest) to 7, within real-time and best effort.
  uint32_t cpu_count = 0;             ///< Entries used in `cpus`; 0 leaves the affinity as it is.
  uint16_t cpus[64] = {};             ///< Affinity of the worker.
  uint64_t bytes_per_second_max = 0;  ///< Upper bound of the write rate; 0 is none.
};

}  // namespace holdfast

#endif  // HOLDFAST_POD_H_
