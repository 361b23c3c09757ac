// A save, step by step. The order is the promise: data, fsync, read-back, names, fsync of the
// directory, manifest, fsync of the directory, commit record, fsync of the directory, the one
// rename, fsync of the parent.
#include <sys/mman.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/accounting.h"
#include "runtime/worker/commit.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/jobs.h"
#include "runtime/worker/manifest.h"
#include "runtime/worker/open_files.h"
#include "runtime/worker/ranks.h"
#include "runtime/worker/read_back.h"
#include "runtime/worker/server.h"
#include "runtime/worker/write_loop.h"

namespace holdfast::worker {
namespace {

/// The only memory whose size depends on the job: 48 bytes per file, a bit per extent, and at rank
/// 0 24 bytes per rank.
bool MapScratch(JobRun* run) {
  const uint64_t notes = AlignUp(run->job->file_count * sizeof(FileNote), 64);
  const uint64_t bits = (uint64_t{run->job->extent_count} + 63) / 64 * sizeof(uint64_t);
  run->scratch_bytes = AlignUp(notes + bits + RankNoteBytes(*run->job));
  run->scratch = sys::Sys().mmap(nullptr, run->scratch_bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (run->scratch == MAP_FAILED) {
    run->scratch = nullptr;
    return FailErrno(run, Operation::kMapNotes, errno);
  }
  HOLDFAST_ASSERT(run->notes == nullptr && notes + bits <= run->scratch_bytes);
  run->notes = static_cast<FileNote*>(run->scratch);
  char* const behind = static_cast<char*>(run->scratch) + notes;
  run->write.taken_bits = reinterpret_cast<uint64_t*>(behind);
  run->ranks.notes = reinterpret_cast<PulseNote*>(behind + bits);
  return true;
}

/// Every extent written and digested, every file fsynced.
bool WriteFiles(JobRun* run) {
  ++run->figures.write_attempts;
  HOLDFAST_ASSERT(run->figures.write_attempts <= 2);
  if (!ReserveFirstFiles(run)) return false;
  if (!WriteExtents(run)) return false;
  SamplePrivateBytes(run);
  SetPhase(run, layout::Phase::kSyncing);
  if (!SyncAllFiles(run)) return false;
  HOLDFAST_ASSERT(run->queue->in_flight() == 0);
  run->times.data_synced = sys::NowNs();
  return true;
}

/// Writes all files once more after a failed fsync, from the sealed memory, which is still held
/// unless the save streams. The files are new: the kernel may have dropped pages of the old files
/// and count them as clean, so the old files prove nothing.
bool WriteFilesAgain(JobRun* run) {
  if (run->failure.operation != Operation::kSync) return false;
  if (run->io_stuck || !layout::Claim(run->job, layout::Written::kRewritten)) return false;
  for (uint32_t i = 0; i < run->job->file_count; ++i) {
    // Another save into a framework's directory has taken the temporary name over.
    if (run->notes[i].created != 0 && !IsOurs(*run, i)) return false;
  }
  HOLDFAST_ASSERT(!run->staging_released && run->queue->in_flight() == 0);
  CloseAllFiles(run);
  // A single file carries the lock of its save: OpenFirst empties the file, and thereby drops its
  // pages. Other files get new inodes; the name of a file that is left is not free.
  if (!run->Has(layout::kSingleFile) && !RemoveFiles(run)) return false;
  PrepareWriteState(run);
  run->failure = Failure();
  return WriteFiles(run);
}

bool Steps(JobRun* run) {
  HOLDFAST_ASSERT(run->figures.write_attempts == 0 && !run->staging_released && run->directory < 0);
  // A job that failed or was cancelled before it started leaves nothing to clean up.
  if (!run->ok() || MustStop(run, false)) return false;
  if (!MapScratch(run)) return false;
  PrepareWriteState(run);
  if (!OpenDirectory(run)) return false;
  if (!WriteFiles(run) && !WriteFilesAgain(run)) return false;
  // Before any rename, so that no wrong file ever has a final name.
  if (run->Has(layout::kReadBack) && !ReadBackFiles(run)) return false;
  // Names, manifests, votes and the commit need no staged byte.
  ReleaseStaging(run);
  HOLDFAST_ASSERT(run->write.proven == run->job->extent_count && run->staging_released);
  // The rename of a single file is its commit.
  if (!run->Has(layout::kSingleFile) && !NameFiles(run)) return false;
  if (!ComputeRoots(run)) return false;
  // Before this rank's vote. Rank 0 looks once more before the commit.
  if (!run->Decides() && !CheckWrittenFiles(run)) return false;
  if (run->Has(layout::kWriteManifest) && !WriteManifest(run)) return false;
  return Commit(run);
}

}  // namespace

void RunSave(JobRun* run) {
  const bool done = Steps(run);
  HOLDFAST_ASSERT(done == run->ok());
  HOLDFAST_ASSERT(!done || run->committed);
  if (!done && !run->io_stuck) {
    // First: the other ranks stop now, and not after the removal of gigabytes here.
    LeaveRanks(run);
    CloseAllFiles(run);
    // Removing takes a quarter of a second per GiB.
    ReleaseStaging(run);
    // Without notes nothing was made but perhaps the trainer's empty directory.
    if (run->notes != nullptr || run->directory < 0 || run->ranks.left) RemoveTraces(run);
    // Once more, for a publication that failed on a full disk: the removal may have freed space.
    LeaveRanks(run);
  }
  SamplePrivateBytes(run);
  // A stuck transfer may still touch these mappings; the process ends soon.
  if (run->io_stuck) return;
  CloseBoard(&run->ranks.board);
  if (run->directory >= 0) sys::CloseOwned(run->directory);
  if (run->scratch != nullptr) sys::Sys().munmap(run->scratch, run->scratch_bytes);
}

}  // namespace holdfast::worker
