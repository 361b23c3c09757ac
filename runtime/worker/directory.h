// The directory that a save writes into: made, filled with names, and cleared after a failure.
#ifndef HOLDFAST_RUNTIME_WORKER_DIRECTORY_H_
#define HOLDFAST_RUNTIME_WORKER_DIRECTORY_H_

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Makes (or finds) the directory and opens it. Refuses an existing target early, unless it is an
/// empty directory.
bool OpenDirectory(JobRun* run);

/// Renames within the job's directory; an existing `to` is EEXIST unless the job replaces files.
/// Returns 0 or an errno.
int RenameNew(JobRun* run, const char* from, const char* to);

/// Gives every file its name, then makes the names durable.
bool NameFiles(JobRun* run);

/// Removes every file that this job made, by whichever name it stands.
void RemoveFiles(JobRun* run);

/// After a failure: removes what this job made, the manifest first and durably, and the directory
/// if nothing is left in it but the board, and no rank can come late. Does nothing when the
/// directory was taken away (fenced or promoted by a recovery), or when the save was committed or
/// is in another rank's hands.
void RemoveTraces(JobRun* run);

/// 0 if `name` below `parent` leads to the open `directory`, ESTALE if to another one, or the errno
/// of the look.
int LeadsTo(int parent, const char* name, int directory);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_DIRECTORY_H_
