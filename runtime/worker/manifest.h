// Completing this rank's manifest from its template, and making it durable.
#ifndef HOLDFAST_RUNTIME_WORKER_MANIFEST_H_
#define HOLDFAST_RUNTIME_WORKER_MANIFEST_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// The root of every file from its sealed chunk digests, into the file table and the template.
bool ComputeRoots(JobRun* run);

/// Fills the worker's slots, then writes MANIFEST.tmp, fsyncs it, gives it its name and fsyncs the
/// directory. The names of all files are durable by then.
bool WriteManifest(JobRun* run);

/// Writes all of `text` to `fd`, fsyncs and closes it, whatever fails.
bool WriteSynced(JobRun* run, int fd, const char* text, uint64_t bytes);

/// "PREFIX00042SUFFIX"
void RankManifestName(const layout::Job& job, uint32_t rank, char (&out)[kNameBytes]);

enum class Found { kYes, kNo, kOther, kFailed };

/// Whether another rank has voted: its manifest is in this job's directory. As FindManifest.
Found FindVote(const JobRun& run, uint32_t rank, int* error_number);
inline bool HasVoted(const JobRun& run, uint32_t rank) {
  int ignored = 0;
  return FindVote(run, rank, &ignored) == Found::kYes;
}

/// Whether manifest `name` below `directory` stands there and is of this job's attempt (kOther: of
/// another). kFailed: it could not be read, `*error_number` says why.
Found FindManifest(const JobRun& run, int directory, const char* name, int* error_number);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_MANIFEST_H_
