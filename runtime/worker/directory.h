// The directory of a save: creates it, names its files, and clears it after a failure.
#ifndef HOLDFAST_RUNTIME_WORKER_DIRECTORY_H_
#define HOLDFAST_RUNTIME_WORKER_DIRECTORY_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Creates or finds the directory and opens it. Refuses an existing target early, unless the target
/// is an empty directory.
bool OpenDirectory(JobRun* run);

/// Renames within the job's directory; an existing `to` is EEXIST unless the job replaces files.
/// Returns 0 or an errno.
int RenameNew(JobRun* run, const char* from, const char* to);

/// Renames every file to its final name, then makes the names durable.
bool NameFiles(JobRun* run);

/// Removes every file that this job made, under its temporary or final name. Returns false when one
/// is left.
bool RemoveFiles(JobRun* run);

/// Cleans up after a failure: removes the manifest first and durably, then this job's other files.
/// Removes the directory when only the board is left and no rank can come late. Does nothing when a
/// recovery has fenced or promoted the directory, when the save was committed, or when the files
/// are in rank 0's hands.
void RemoveTraces(JobRun* run);

/// 0 if `name` below `parent` leads to the open `directory`, ESTALE if to another one, or the errno
/// of the look.
int LeadsTo(int parent, const char* name, int directory);

/// True for an error of LeadsTo that proves that the directory lost the name. After another error
/// of the look nothing is known.
bool MeansMoved(int error_number);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_DIRECTORY_H_
