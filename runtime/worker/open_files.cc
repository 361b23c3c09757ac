#include "runtime/worker/open_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/ranks.h"
#include "runtime/worker/remove_file.h"
#include "runtime/worker/single_file.h"

namespace holdfast::worker {
namespace {

/// Reserves the file's blocks. A full disk is then an error now and not after gigabytes, and
/// extending writes do not serialize in the file system.
bool Reserve(JobRun* run, int fd, uint32_t file) {
  const uint64_t bytes = AlignUp(layout::Files(run->job)[file].bytes);
  if (bytes == 0) return true;
  const int result =
      sys::Uninterrupted([&] { return sys::Sys().fallocate(fd, 0, 0, static_cast<off_t>(bytes)); });
  if (result == 0) return true;
  // posix_fallocate would write every block instead; a file system that cannot reserve is gone on
  // with, and the report says so.
  if (errno == EOPNOTSUPP || errno == ENOSYS) {
    run->figures.space_reserved = false;
    return true;
  }
  // ext4 keeps the blocks allocated before the error: the clean-up's unlink frees them.
  return FailErrno(run, Operation::kReserve, errno, file, 0, bytes);
}

uint64_t NsOf(const statx_timestamp& time) {
  return static_cast<uint64_t>(time.tv_sec) * sys::kNsPerSecond + time.tv_nsec;
}

/// Reads the file's identity, unique among past and future files. Returns false, with an errno, if
/// the file is absent.
bool Identify(int directory, const char* name, int flags, FileIdentity* out) {
  struct statx found = {};
  constexpr unsigned kMask = STATX_INO | STATX_BTIME | STATX_CTIME | STATX_MTIME | STATX_SIZE;
  if (sys::Sys().statx(directory, name, flags, kMask, &found) != 0) return false;
  const bool born = (found.stx_mask & STATX_BTIME) != 0;
  out->inode = found.stx_ino;
  out->stamp_ns = NsOf(born ? found.stx_btime : found.stx_ctime);
  out->modified_ns = NsOf(found.stx_mtime);
  out->bytes = found.stx_size;
  return true;
}

/// Closes NAME.tmp of `file` and records its identity for IsOurs and CheckWritten.
int CloseFile(JobRun* run, uint32_t file, int fd) {
  HOLDFAST_ASSERT(fd >= 0 && file < run->job->file_count);
  FileNote& note = run->notes[file];
  note.slot = FileNote::kNoSlot;
  Identify(fd, "", AT_EMPTY_PATH, &note.identity);
  return sys::CloseOwned(fd);
}

bool OpenFirst(JobRun* run, uint32_t file, io::DirectOpen* opened) {
  HOLDFAST_ASSERT(run->directory >= 0 && run->notes[file].created == 0);
  char name[kNameBytes];
  TemporaryOf(*run, file, name);
  const bool want_direct = !run->Has(layout::kBuffered);
  // The trainer has made a single file, for its lock. A first attempt has perhaps filled it.
  const bool made = run->Has(layout::kSingleFile);
  if (made && !CheckTemporary(run)) return false;
  const int flags = O_WRONLY | O_NOFOLLOW | (made ? O_TRUNC : O_CREAT | O_EXCL);
  int error = io::OpenDirect(run->directory, name, flags, sys::kFileMode, want_direct, opened);
  if (error == EEXIST && run->Has(layout::kFilesOnly)) {
    // A killed attempt may have left the file: a framework's directory keeps its name between
    // attempts.
    const int left = RemoveFile(run->directory, name, run->job, OnCancel::kStop);
    if (left != 0 && left != ENOENT) {
      return !MustStop(run, true) && FailErrno(run, Operation::kOpen, left, file);
    }
    error = io::OpenDirect(run->directory, name, flags, sys::kFileMode, want_direct, opened);
  }
  // Anything but EEXIST may have come after the file was made.
  if (error != EEXIST) run->notes[file].created = 1;
  if (error != 0) return FailErrno(run, Operation::kOpen, error, file);
  if (run->Has(layout::kFilesOnly)) {
    if (!Identify(opened->fd, "", AT_EMPTY_PATH, &run->notes[file].identity)) {
      const int failed = errno;
      sys::CloseOwned(opened->fd);
      return FailErrno(run, Operation::kOpen, failed, file);
    }
  }
  WorkerFigures& figures = run->figures;
  if (!run->opened_any || opened->direct < figures.direct_io) figures.direct_io = opened->direct;
  figures.space_reserved = figures.space_reserved || !run->opened_any;
  run->opened_any = true;
  if (!Reserve(run, opened->fd, file)) {
    CloseFile(run, file, opened->fd);
    return false;
  }
  return true;
}

bool OpenAgain(JobRun* run, uint32_t file, io::DirectOpen* opened) {
  HOLDFAST_ASSERT(run->notes[file].created != 0 && run->notes[file].renamed == 0);
  char name[kNameBytes];
  TemporaryOf(*run, file, name);
  const int error = io::OpenDirect(run->directory, name, O_WRONLY | O_NOFOLLOW, 0,
                                   !run->Has(layout::kBuffered), opened);
  if (error != 0) return FailErrno(run, Operation::kOpen, error, file);
  if (CheckOurs(run, file, Operation::kOpen)) return true;
  sys::CloseOwned(opened->fd);
  return false;
}

/// Writes a file's pages back in steps. One fsync of hundreds of GiB shows no progress for minutes,
/// and no cancel or failure of another rank ends it.
bool WriteBack(JobRun* run, const OpenFile& open) {
  constexpr uint64_t kStepBytes = 32 << 20;
  // Proven direct I/O leaves no pages.
  if (open.direct == DirectIo::kProven) return true;
  const uint64_t bytes = layout::Files(run->job)[open.file].bytes;
  const auto range = [&](uint64_t offset, unsigned flags) {
    return sys::Uninterrupted([&] {
      return sys::Sys().sync_file_range(open.fd, static_cast<off_t>(offset), kStepBytes, flags);
    });
  };
  constexpr unsigned kWait =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  for (uint64_t offset = 0; offset + kStepBytes < bytes; offset += kStepBytes) {
    // The next step starts before the wait for the present step, so that the disk is never idle.
    const int result = range(offset + kStepBytes, SYNC_FILE_RANGE_WRITE);
    if (result != 0 || range(offset, kWait) != 0) {
      // Where the call is missing or forbidden, the fsync writes everything back.
      if (errno == ENOSYS || errno == EPERM || errno == EINVAL || errno == ESPIPE) return true;
      return FailErrno(run, Operation::kSync, errno, open.file);
    }
    CountStep(run->job);
    if (MustStop(run, true)) return false;
  }
  return true;
}

/// Syncs and closes the file. The file is closed also on failure.
bool SyncAndClose(JobRun* run, uint16_t slot) {
  HOLDFAST_ASSERT(slot < kOpenFilesMax);
  OpenFile& open = run->open[slot];
  HOLDFAST_ASSERT(open.fd >= 0 && open.in_flight == 0);
  HOLDFAST_ASSERT(open.file < run->job->file_count && run->notes[open.file].slot == slot);
  FileNote& note = run->notes[open.file];
  const layout::File& file = layout::Files(run->job)[open.file];
  const bool complete = note.extents_left == 0;
  const uint64_t begin = sys::NowNs();
  bool ok = true;
  // Direct I/O wrote whole blocks. The truncation precedes the fsync, so that no crash leaves a
  // durable file with padding at its end.
  if (complete && file.bytes != AlignUp(file.bytes)) {
    if (sys::Sys().ftruncate(open.fd, static_cast<off_t>(file.bytes)) != 0) {
      ok = FailErrno(run, Operation::kTruncate, errno, open.file);
    }
  }
  // Without the fsync a crash after the commit leaves a manifest that names a file whose blocks,
  // length or extent map were still in a cache. The first failure ends the attempt: the kernel
  // drops pages that it could not write, so a second fsync that returns 0 would prove nothing.
  ok = ok && WriteBack(run, open);
  BeginSilence(run);
  if (ok && sys::Sys().fsync(open.fd) != 0) {
    ok = FailErrno(run, Operation::kSync, errno, open.file);
  }
  EndSilence(run);
  // Network file systems report the last write errors here.
  const int closed = CloseFile(run, open.file, open.fd);
  open.fd = -1;
  if (closed != 0 && ok && errno != EINTR) {
    ok = FailErrno(run, Operation::kSync, errno, open.file);
  }
  if (ok && complete) note.synced = 1;
  const uint64_t end = sys::NowNs();
  run->time_syncing_ns += end - begin;
  run->write.progress_ns = end;  // A slow fsync is no stall of the transfers.
  CountStep(run->job);
  return ok;
}

/// Finds a slot for one more file. Evicts complete files first; writing resumes later for an
/// incomplete file.
Acquired FreeSlot(JobRun* run, uint16_t* slot) {
  uint16_t incomplete = FileNote::kNoSlot;
  for (uint16_t i = 0; i < kOpenFilesMax; ++i) {
    const OpenFile& open = run->open[i];
    if (open.fd < 0) {
      *slot = i;
      return Acquired::kReady;
    }
    if (open.in_flight != 0) continue;
    if (run->notes[open.file].extents_left == 0) {
      *slot = i;
      return SyncAndClose(run, i) ? Acquired::kReady : Acquired::kFailed;
    }
    incomplete = i;
  }
  if (incomplete == FileNote::kNoSlot) return Acquired::kBusy;
  *slot = incomplete;
  return SyncAndClose(run, incomplete) ? Acquired::kReady : Acquired::kFailed;
}

/// Returns 0 while NAME.tmp is the file that this job made, ESTALE when it is another one, or the
/// errno of the look.
int LeadsToOurs(const JobRun& run, uint32_t file) {
  if (!run.Has(layout::kFilesOnly)) return 0;
  char name[kNameBytes];
  TemporaryOf(run, file, name);
  const FileNote& note = run.notes[file];
  FileIdentity found;
  if (!Identify(run.directory, name, AT_SYMLINK_NOFOLLOW, &found)) return errno;
  if (note.identity.inode == 0) return 0;
  const bool open = note.slot != FileNote::kNoSlot;
  const bool same =
      found.inode == note.identity.inode && (open || found.stamp_ns == note.identity.stamp_ns);
  return same ? 0 : ESTALE;
}

}  // namespace

bool IsOurs(const JobRun& run, uint32_t file) { return LeadsToOurs(run, file) == 0; }

bool CheckOurs(JobRun* run, uint32_t file, Operation operation) {
  const int error = LeadsToOurs(*run, file);
  if (error == 0) return true;
  if (MeansMoved(error)) return Fail(run, FailureCode::kAborted, operation, file);
  return FailErrno(run, operation, error, file);
}

bool CheckWritten(JobRun* run, uint32_t file, const char* name) {
  const FileNote& note = run->notes[file];
  HOLDFAST_ASSERT(note.synced != 0 && note.slot == FileNote::kNoSlot);
  FileIdentity found;
  const bool present = Identify(run->directory, name, AT_SYMLINK_NOFOLLOW, &found);
  if (!present && errno != ENOENT) return FailErrno(run, Operation::kRename, errno, file);
  CountStep(run->job);
  bool same = present && found.bytes == layout::Files(run->job)[file].bytes;
  // Not the time of change: a hard link or a chmod of another program changes no byte.
  if (run->Has(layout::kStableInodes) && note.identity.inode != 0) {
    same = same && found.inode == note.identity.inode &&
           found.modified_ns == note.identity.modified_ns;
  }
  return same || Fail(run, FailureCode::kDataLoss, Operation::kRename, file);
}

bool CheckWrittenFiles(JobRun* run) {
  for (uint32_t i = 0; i < run->job->file_count; ++i) {
    if (run->Writes(i) && !CheckWritten(run, i, layout::Files(run->job)[i].name)) return false;
  }
  return true;
}

Acquired AcquireFile(JobRun* run, uint32_t file, uint16_t* slot) {
  HOLDFAST_ASSERT(file < run->job->file_count && run->Writes(file));
  FileNote& note = run->notes[file];
  if (note.slot != FileNote::kNoSlot) {
    *slot = note.slot;
    HOLDFAST_ASSERT(*slot < kOpenFilesMax && run->open[*slot].file == file);
    return Acquired::kReady;
  }
  const Acquired freed = FreeSlot(run, slot);
  if (freed != Acquired::kReady) return freed;
  HOLDFAST_ASSERT(*slot < kOpenFilesMax && run->open[*slot].fd < 0);
  io::DirectOpen opened;
  const bool ok = note.created == 0 ? OpenFirst(run, file, &opened) : OpenAgain(run, file, &opened);
  if (!ok) return Acquired::kFailed;
  run->open[*slot] = {.fd = opened.fd, .file = file, .direct = opened.direct};
  note.slot = *slot;
  HOLDFAST_ASSERT(note.created != 0);
  return Acquired::kReady;
}

bool ReserveFirstFiles(JobRun* run) {
  const uint32_t file_count = run->job->file_count;
  for (uint32_t file = 0; file < file_count && file < kOpenFilesMax; ++file) {
    uint16_t slot = 0;
    if (run->Writes(file) && AcquireFile(run, file, &slot) != Acquired::kReady) return false;
  }
  return true;
}

bool SyncAllFiles(JobRun* run) {
  for (uint32_t file = 0; file < run->job->file_count; ++file) {
    if (run->notes[file].synced != 0) continue;
    uint16_t slot = 0;
    // Nothing is in flight any more, so there is always a slot.
    if (AcquireFile(run, file, &slot) != Acquired::kReady) return false;
    HOLDFAST_ASSERT(run->notes[file].extents_left == 0);
    if (!SyncAndClose(run, slot)) return false;
    HOLDFAST_ASSERT(run->notes[file].synced != 0);
    if (MustStop(run, true)) return false;
  }
  return true;
}

void CloseAllFiles(JobRun* run) {
  for (OpenFile& open : run->open) {
    if (open.fd >= 0) CloseFile(run, open.file, open.fd);
    open.fd = -1;
  }
}

}  // namespace holdfast::worker
