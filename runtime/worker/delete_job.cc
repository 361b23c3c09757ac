// Removes retired checkpoints, one after the other, in a separate job. Removal takes a quarter of a
// second per GiB, and no save waits for it.
#include "runtime/sys/assert.h"
#include "runtime/worker/jobs.h"
#include "runtime/worker/remove_tree.h"

namespace holdfast::worker {

void RunDelete(JobRun* run) {
  HOLDFAST_ASSERT(run->directory < 0 && run->job->trash.bytes % kNameBytes == 0);
  SetPhase(run, layout::Phase::kRemoving);
  run->all_sealed = true;  // Nothing more is needed from the trainer.
  const char* const names = layout::At<char>(run->job, run->job->trash);
  for (uint64_t at = 0; at < run->job->trash.bytes; at += kNameBytes) {
    if (MustStop(run, true)) return;
    // A directory that cannot be removed does not keep the rest: the first failure is reported.
    Failure failure;
    if (!RemoveDirectory(run->parent, names + at, run->directory_buffer, run->job, &failure)) {
      failure.file = static_cast<uint32_t>(at / kNameBytes);
      Fail(run, failure);
    }
  }
}

}  // namespace holdfast::worker
