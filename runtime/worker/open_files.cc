#include "runtime/worker/open_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::worker {
namespace {

constexpr mode_t kFileMode = 0666;  // the umask takes its part

/// Reserves the file's blocks, so that a full disk is an error now and not after gigabytes, and so
/// that extending writes do not serialize in the file system.
bool Reserve(JobRun* run, int fd, uint32_t file) {
  const uint64_t bytes = layout::AlignUp(layout::Files(run->job)[file].bytes);
  if (bytes == 0) return true;
  int result = 0;
  do {
    result = sys::Sys().fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  // posix_fallocate would write every block instead; a file system that cannot reserve is gone on
  // with, and the report says so.
  if (errno == EOPNOTSUPP || errno == ENOSYS) {
    run->reserved_all = false;
    return true;
  }
  // ext4 leaves the blocks that it found allocated: the clean-up's unlink gives them back.
  return FailErrno(run, Operation::kReserve, errno, file, 0, bytes);
}

bool OpenFirst(JobRun* run, uint32_t file, io::DirectOpen* opened) {
  char name[kNameBytes];
  TemporaryName(layout::Files(run->job)[file].name, name);
  const bool want_direct = !run->Has(layout::kBuffered);
  constexpr int kFlags = O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW;
  int error = io::OpenDirect(run->directory, name, kFlags, kFileMode, want_direct, opened);
  if (error == EEXIST && run->Has(layout::kFilesOnly)) {
    // Left by an attempt that was killed: a framework's directory keeps its name between attempts.
    sys::Sys().unlinkat(run->directory, name, 0);
    error = io::OpenDirect(run->directory, name, kFlags, kFileMode, want_direct, opened);
  }
  // Anything but EEXIST may have come after the file was made.
  if (error != EEXIST) run->notes[file].created = 1;
  if (error != 0) return FailErrno(run, Operation::kOpen, error, file);
  sys::OwnFd(opened->fd);
  if (run->Has(layout::kFilesOnly)) {
    struct stat made = {};
    if (sys::Sys().fstat(opened->fd, &made) != 0) {
      sys::CloseOwned(opened->fd);
      return FailErrno(run, Operation::kOpen, errno, file);
    }
    run->notes[file].inode = made.st_ino;
  }
  if (!run->opened_any || opened->direct < run->direct_io) run->direct_io = opened->direct;
  run->opened_any = true;
  if (!Reserve(run, opened->fd, file)) {
    sys::CloseOwned(opened->fd);
    return false;
  }
  return true;
}

bool OpenAgain(JobRun* run, uint32_t file, io::DirectOpen* opened) {
  char name[kNameBytes];
  TemporaryName(layout::Files(run->job)[file].name, name);
  const int error = io::OpenDirect(run->directory, name, O_WRONLY | O_NOFOLLOW, 0,
                                   !run->Has(layout::kBuffered), opened);
  if (error != 0) return FailErrno(run, Operation::kOpen, error, file);
  sys::OwnFd(opened->fd);
  if (IsOurs(*run, file)) return true;
  sys::CloseOwned(opened->fd);
  return Fail(run, FailureCode::kAborted, Operation::kOpen, file);
}

/// Ends with the file closed, whatever happens.
bool SyncAndClose(JobRun* run, uint16_t slot) {
  OpenFile& open = run->open[slot];
  FileNote& note = run->notes[open.file];
  const layout::File& file = layout::Files(run->job)[open.file];
  const bool complete = note.extents_left == 0;
  const uint64_t begin = sys::NowNs();
  bool ok = true;
  // Direct I/O wrote whole blocks. The cut comes before the fsync, so that no crash leaves a
  // durable file with padding at its end.
  if (complete && file.bytes != layout::AlignUp(file.bytes)) {
    if (sys::Sys().ftruncate(open.fd, static_cast<off_t>(file.bytes)) != 0) {
      ok = FailErrno(run, Operation::kTruncate, errno, open.file);
    }
  }
  // Without it a crash after the commit leaves a manifest that names a file whose blocks, length or
  // extent map were still in a cache. The first failure ends the attempt: the kernel drops what it
  // could not write, so a second fsync that returns 0 would prove nothing.
  if (ok && sys::Sys().fsync(open.fd) != 0) {
    ok = FailErrno(run, Operation::kSync, errno, open.file);
  }
  // Network file systems report the last write errors here.
  if (sys::CloseOwned(open.fd) != 0 && ok && errno != EINTR) {
    ok = FailErrno(run, Operation::kSync, errno, open.file);
  }
  open.fd = -1;
  note.slot = FileNote::kNoSlot;
  if (ok && complete) note.synced = 1;
  const uint64_t end = sys::NowNs();
  run->time_syncing_ns += end - begin;
  run->write.progress_ns = end;  // A slow fsync is no stall of the transfers.
  CountStep(run->job);
  return ok;
}

/// A slot for one more file. Complete files go first; an incomplete one is written on later.
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

}  // namespace

bool IsOurs(const JobRun& run, uint32_t file) {
  if (!run.Has(layout::kFilesOnly)) return true;
  char name[kNameBytes];
  TemporaryName(layout::Files(run.job)[file].name, name);
  struct stat named = {};
  return sys::Sys().fstatat(run.directory, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         (named.st_ino == run.notes[file].inode || run.notes[file].inode == 0);
}

Acquired AcquireFile(JobRun* run, uint32_t file, uint16_t* slot) {
  FileNote& note = run->notes[file];
  if (note.slot != FileNote::kNoSlot) {
    *slot = note.slot;
    return Acquired::kReady;
  }
  const Acquired freed = FreeSlot(run, slot);
  if (freed != Acquired::kReady) return freed;
  io::DirectOpen opened;
  const bool ok = note.created == 0 ? OpenFirst(run, file, &opened) : OpenAgain(run, file, &opened);
  if (!ok) return Acquired::kFailed;
  run->open[*slot] = {.fd = opened.fd, .file = file, .in_flight = 0};
  note.slot = *slot;
  return Acquired::kReady;
}

bool ReserveFirstFiles(JobRun* run) {
  const uint32_t file_count = run->job->file_count;
  for (uint32_t file = 0; file < file_count && file < kOpenFilesMax; ++file) {
    uint16_t slot = 0;
    if (AcquireFile(run, file, &slot) != Acquired::kReady) return false;
  }
  return true;
}

bool SyncAllFiles(JobRun* run) {
  for (uint32_t file = 0; file < run->job->file_count; ++file) {
    if (run->notes[file].synced != 0) continue;
    uint16_t slot = 0;
    // Nothing is in flight any more, so there is always a slot.
    if (AcquireFile(run, file, &slot) != Acquired::kReady) return false;
    if (!SyncAndClose(run, slot)) return false;
    if (MustStop(run, true)) return false;
  }
  return true;
}

void CloseAllFiles(JobRun* run) {
  for (OpenFile& open : run->open) {
    if (open.fd >= 0) sys::CloseOwned(open.fd);
    open.fd = -1;
  }
}

}  // namespace holdfast::worker
