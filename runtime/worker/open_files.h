// The open files of a save: a bounded set for any number of files.
//
// A file is created as NAME.tmp, reserved, written, truncated to its true length, fsynced and
// closed. Files get their names when every file is durable (commit.h). A file that leaves the set
// before completion is fsynced first. The kernel reports a write-back error to descriptors that
// were open at the error, so a close without fsync could lose the error.
#ifndef HOLDFAST_RUNTIME_WORKER_OPEN_FILES_H_
#define HOLDFAST_RUNTIME_WORKER_OPEN_FILES_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

enum class Acquired {
  kReady,   ///< `*slot` holds the file.
  kBusy,    ///< Every open file has transfers in flight: wait for a completion.
  kFailed,  ///< The failure is recorded.
};

/// Returns true while NAME.tmp is the file that this job made. In a framework's directory another
/// save of the same file may have taken over the name; the other save's half-written bytes must not
/// get the final name.
bool IsOurs(const JobRun& run, uint32_t file);

/// Fails unless IsOurs: with kAborted when the name is gone or leads to another file, otherwise
/// with the error of the look.
bool CheckOurs(JobRun* run, uint32_t file, Operation operation);

/// Fails with kDataLoss when the entry `name` differs from `file` at its close: another program has
/// removed, replaced or changed the file. A change within the same tick of the file system's clock
/// as the last write, and of the same length, is not seen.
bool CheckWritten(JobRun* run, uint32_t file, const char* name);

/// CheckWritten for every file of this rank, under the final names.
bool CheckWrittenFiles(JobRun* run);

/// Opens `file` unless it is open.
Acquired AcquireFile(JobRun* run, uint32_t file, uint16_t* slot);

/// Opens and reserves the first files, as many as are kept open, so that a full disk is found
/// before anything was written.
bool ReserveFirstFiles(JobRun* run);

/// Makes every complete file durable and closes it; creates empty files.
bool SyncAllFiles(JobRun* run);

/// Closes all open files after a failure, without a proof of durability.
void CloseAllFiles(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_OPEN_FILES_H_
