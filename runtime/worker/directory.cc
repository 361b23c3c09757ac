#include "runtime/worker/directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/errno_code.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/commit_record.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/open_files.h"
#include "runtime/worker/ranks.h"
#include "runtime/worker/remove_file.h"
#include "runtime/worker/remove_tree.h"
#include "runtime/worker/single_file.h"

namespace holdfast::worker {
namespace {

/// Refuses a name in use: a rename must not replace the file of another program.
bool NameIsFree(int directory, const char* name, int* error_number) {
  struct stat status = {};
  if (sys::Sys().fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) == 0) {
    *error_number = EEXIST;
    return false;
  }
  *error_number = errno;
  return errno == ENOENT;
}

/// An empty directory that a launcher made beforehand does not block a save.
bool TargetIsEmpty(const JobRun& run) {
  const int target = sys::OpenOwned(run.parent, run.job->target,
                                    O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (target < 0) return false;
  const bool empty = IsEmpty(target, run.directory_buffer);
  sys::CloseOwned(target);
  return empty;
}

bool OpenPartial(JobRun* run) {
  HOLDFAST_ASSERT(run->directory < 0 && run->parent >= 0 && run->lock >= 0);
  const layout::Job& job = *run->job;
  int error = 0;
  if (!run->Has(layout::kReplaceExisting) && !NameIsFree(run->parent, job.target, &error) &&
      !TargetIsEmpty(*run)) {
    // Before gigabytes are written. The rename at the end checks again.
    return FailErrno(run, Operation::kRename, error);
  }
  // The trainer has made the directory, and the lock is on it. A recovery that has fenced the save
  // since has moved the directory away: a directory made anew would undo the fence.
  if (MeansMoved(LeadsTo(run->parent, job.partial, run->lock))) {
    return Fail(run, FailureCode::kAborted, Operation::kRename);
  }
  run->directory =
      sys::OpenOwned(run->lock, ".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (run->directory < 0) return FailErrno(run, Operation::kOpen, errno);
  // Before the first file, durably: without a mark a crash leaves files that no recovery removes.
  if (!MakeMark(run) || !JoinRanks(run)) return false;
  if (sys::Sys().fsync(run->directory) != 0) {
    return FailErrno(run, Operation::kSyncDirectory, errno);
  }
  // Without the fsync a crash can lose the directory together with the fsynced files. A recovery
  // could then not promote files that every rank had made durable.
  return sys::Sys().fsync(run->parent) == 0 || FailErrno(run, Operation::kSyncDirectory, errno);
}

void Unlink(const JobRun& run, const char* name) { sys::Sys().unlinkat(run.directory, name, 0); }

}  // namespace

bool OpenDirectory(JobRun* run) {
  HOLDFAST_ASSERT(run->directory < 0 && run->parent >= 0);
  if (!run->Has(layout::kFilesOnly)) return OpenPartial(run);
  // The framework made this directory and may reach it through symlinks.
  run->directory =
      sys::OpenOwned(run->parent, run->job->target, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  return run->directory >= 0 || FailErrno(run, Operation::kOpen, errno);
}

int LeadsTo(int parent, const char* name, int directory) {
  struct stat named = {};
  struct stat open = {};
  if (sys::Sys().fstatat(parent, name, &named, AT_SYMLINK_NOFOLLOW) != 0 ||
      sys::Sys().fstat(directory, &open) != 0) {
    return errno;
  }
  return named.st_ino == open.st_ino && named.st_dev == open.st_dev ? 0 : ESTALE;
}

bool MeansMoved(int error_number) { return error_number == ENOENT || error_number == ESTALE; }

int RenameNew(JobRun* run, const char* from, const char* to) {
  HOLDFAST_ASSERT(run->directory >= 0 && strcmp(from, to) != 0);
  const bool replace = run->Has(layout::kFilesOnly) && run->Has(layout::kReplaceExisting);
  const unsigned flags = replace ? 0 : RENAME_NOREPLACE;
  if (sys::Sys().renameat2(run->directory, from, run->directory, to, flags) == 0) return 0;
  if (flags == 0 || !sys::LacksRenameFlag(errno)) return errno;
  // Without RENAME_NOREPLACE: look first. Only this attempt writes
  // to the directory, so no rename can come between.
  int error = 0;
  if (!NameIsFree(run->directory, to, &error)) return error;
  return sys::Sys().renameat2(run->directory, from, run->directory, to, 0) == 0 ? 0 : errno;
}

bool NameFiles(JobRun* run) {
  HOLDFAST_ASSERT(run->directory >= 0 && !run->manifest_made && !run->committed);
  const uint64_t begin = sys::NowNs();
  for (uint32_t i = 0; i < run->job->file_count; ++i) {
    if (MustStop(run, true)) return false;
    if (!run->Writes(i)) continue;
    // Another save of this file into the same directory may have taken over the temporary name.
    if (!CheckOurs(run, i, Operation::kRename)) return false;
    HOLDFAST_ASSERT(run->notes[i].synced != 0 && run->notes[i].renamed == 0);
    const char* const name = layout::Files(run->job)[i].name;
    char temporary[kNameBytes];
    TemporaryName(name, temporary);
    // In a framework's directory a final name may stand for the framework's commit.
    if (run->Has(layout::kFilesOnly) && !CheckWritten(run, i, temporary)) return false;
    // After the data's fsync: a name never leads to a file whose bytes a crash could take away.
    if (const int error = RenameNew(run, temporary, name); error != 0) {
      return FailErrno(run, Operation::kRename, error, i);
    }
    // Another program may have taken the temporary name between the look and the rename.
    if (run->Has(layout::kFilesOnly) && !CheckWritten(run, i, name)) {
      sys::Sys().renameat2(run->directory, name, run->directory, temporary, RENAME_NOREPLACE);
      return false;
    }
    run->notes[i].renamed = 1;
  }
  // Before the manifest: without the fsync a crash could leave a durable manifest beside files that
  // are still called NAME.tmp.
  if (sys::Sys().fsync(run->directory) != 0) {
    return FailErrno(run, Operation::kSyncDirectory, errno);
  }
  run->time_syncing_ns += sys::NowNs() - begin;
  return true;
}

bool RemoveFiles(JobRun* run) {
  if (run->notes == nullptr) return true;  // Failed before any file was made.
  HOLDFAST_ASSERT(run->directory >= 0 && !run->committed);
  bool removed = true;
  for (uint32_t i = 0; i < run->job->file_count; ++i) {
    const FileNote& note = run->notes[i];
    HOLDFAST_ASSERT(note.slot == FileNote::kNoSlot && note.renamed <= note.created);
    if (note.created == 0) continue;
    const char* const name = layout::Files(run->job)[i].name;
    char temporary[kNameBytes];
    TemporaryOf(*run, i, temporary);
    if (note.renamed == 0 && !IsOurs(*run, i)) continue;
    const int error =
        RemoveFile(run->directory, note.renamed != 0 ? name : temporary, run->job, OnCancel::kGoOn);
    removed = removed && (error == 0 || error == ENOENT);
  }
  return removed;
}

void RemoveTraces(JobRun* run) {
  if (run->committed || run->voted) return;
  const bool files_only = run->Has(layout::kFilesOnly);
  if (run->directory < 0) {
    // No file was written. The trainer may have made the directory, for its lock.
    if (!files_only) sys::Sys().unlinkat(run->parent, run->job->partial, AT_REMOVEDIR);
    return;
  }
  // A recovery that fenced or promoted this directory owns it now.
  if (!files_only && LeadsTo(run->parent, run->job->partial, run->directory) != 0) return;
  if (run->Has(layout::kSingleFile) && IsPromoted(*run)) return;
  HOLDFAST_ASSERT(run->manifest_made >= run->manifest_named);
  HOLDFAST_ASSERT(run->record_made >= run->record_named);
  HOLDFAST_ASSERT(!run->io_stuck);
  SetPhase(run, layout::Phase::kRemoving);
  // No record from here on, and a mark up to the last file. Durable with the manifest's removal.
  if (run->record_named) {
    sys::Sys().renameat2(run->directory, layout::kCommitRecordName, run->directory, kMarkName, 0);
  }
  if (run->manifest_named) {
    Unlink(*run, run->job->manifest);
    // The manifest goes first and durably. After a crash during the removal no manifest may name
    // removed files. Names of files can be older than their removal on disk, so the directory could
    // look complete.
    sys::Sys().fsync(run->directory);
  } else if (run->manifest_made) {
    char temporary[kNameBytes];
    TemporaryName(run->job->manifest, temporary);
    Unlink(*run, temporary);
  }
  RemoveFiles(run);
  if (files_only) return;
  const RankBoard& board = run->ranks.board;
  const bool all_failed =
      board.is_open() && AllHaveFailed(board, run->directory_buffer, kDirectoryBufferBytes);
  const bool emptied = HoldsOnlyMarks(run->directory, run->directory_buffer);
  // After a crash, files whose removal is not durable may be back (Btrfs). Without a mark, a
  // recovery would keep the files as a user's.
  if (emptied && SyncRemovals(run->directory) != 0) return;
  // The board is a mark, too.
  if (run->record_made && (board.is_open() || emptied)) Unlink(*run, kMarkName);
  // The last rank to fail removes the board. Until then a late rank finds the reason of the failure
  // in it. Files of a killed worker keep the board, and a recovery removes all.
  if (all_failed && emptied) {
    Unlink(*run, kMarkName);
    Unlink(*run, layout::kBoardName);
  }
  // Fails while other ranks' files are present.
  sys::Sys().unlinkat(run->parent, run->job->partial, AT_REMOVEDIR);
}

}  // namespace holdfast::worker
