// Rank 0's commit record: a small file that describes the checkpoint. A reader of the record does
// not need the manifests of all ranks.
#ifndef HOLDFAST_RUNTIME_WORKER_COMMIT_RECORD_H_
#define HOLDFAST_RUNTIME_WORKER_COMMIT_RECORD_H_

#include <cstddef>
#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Digests every rank's manifest into the record's template, writes and fsyncs RECORD.tmp, and
/// renames it. The caller fsyncs the directory. All votes must be present. Writes nothing where the
/// job has no template, where a recovery has promoted the directory, or where the version of a
/// rank's manifest does not state its bytes.
bool WriteCommitRecord(JobRun* run);

/// Makes RECORD.tmp, empty, as the mark of the directory: see IsMark. Not where the job has no
/// template.
bool MakeMark(JobRun* run);

/// The number behind "files_bytes" near the beginning of a manifest. A name cannot imitate the key:
/// its quotes are escaped.
bool FindFilesBytes(const char* head, size_t length, uint64_t* out);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_COMMIT_RECORD_H_
