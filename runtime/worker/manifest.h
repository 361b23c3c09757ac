// Completes this rank's manifest from its template and makes it durable.
#ifndef HOLDFAST_RUNTIME_WORKER_MANIFEST_H_
#define HOLDFAST_RUNTIME_WORKER_MANIFEST_H_

#include <cstdint>

#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// Computes every file's root and the digest of the replicas from the sealed chunk digests, into
/// the file table and the template.
bool ComputeRoots(JobRun* run);

/// Fills the worker's slots, writes and fsyncs MANIFEST.tmp, renames it, and fsyncs the directory.
/// The names of all files must be durable.
bool WriteManifest(JobRun* run);

/// Writes all of `text` to `fd`, fsyncs it, and closes `fd` on success and failure.
bool WriteSynced(JobRun* run, int fd, const char* text, uint64_t bytes);

/// "PREFIX00042SUFFIX"
void RankManifestName(const layout::Job& job, uint32_t rank, char (&out)[kNameBytes]);

enum class Found { kYes, kNo, kOther, kDiffers, kFailed };

/// Looks for another rank's vote, its manifest in this job's directory. Returns as FindManifest;
/// kDiffers when that rank's replicated files are not this rank's.
Found FindVote(const JobRun& run, uint32_t rank, int* error_number);
inline bool HasVoted(const JobRun& run, uint32_t rank) {
  int ignored = 0;
  const Found found = FindVote(run, rank, &ignored);
  return found == Found::kYes || found == Found::kDiffers;
}

/// Looks for manifest `name` of this job's attempt below `directory`. Returns kOther for a manifest
/// of another attempt. Returns kFailed when reading fails, with the errno in `*error_number`.
Found FindManifest(const JobRun& run, int directory, const char* name, int* error_number);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_MANIFEST_H_
