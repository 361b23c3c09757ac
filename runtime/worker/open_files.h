// The files of the save that are open: a bounded set, whatever the number of files.
//
// A file is created as NAME.tmp, reserved, written, cut to its true length, fsynced and closed; it
// gets its name when all are durable (commit.h). One that must make room before it is complete is
// fsynced first: an error of the write-back is reported to fds that were open when it happened, so
// a close without fsync could lose it.
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

/// Whether NAME.tmp is still the file that this job made. In a framework's directory another save
/// of the same file may have taken the name over; its half-written bytes must not get ours.
bool IsOurs(const JobRun& run, uint32_t file);

/// Opens `file` if it is not.
Acquired AcquireFile(JobRun* run, uint32_t file, uint16_t* slot);

/// Opens and reserves the first files, as many as are kept open, so that a full disk is found
/// before anything was written.
bool ReserveFirstFiles(JobRun* run);

/// Makes every complete file durable and closes it; creates those without bytes.
bool SyncAllFiles(JobRun* run);

/// After a failure: closes what is open, proves nothing.
void CloseAllFiles(JobRun* run);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_OPEN_FILES_H_
