#include "runtime/checkpointer/lineage.h"

#include "runtime/directory/listing.h"

namespace holdfast::checkpointer {

void Lineage::Begin(int directory) { Committed(directory::NewestAttempt(directory)); }

void Lineage::Committed(const AttemptId& attempt) {
  const base::MutexLock lock(&mutex_);
  last_ = attempt;
}

format::CommitTemplate Lineage::RecordOf(const CheckpointerOptions& options,
                                         const SaveRequest& request, const AttemptId& attempt,
                                         uint64_t saved_at_ns) const {
  // In a framework's directory the framework's own last file commits.
  if (options.rank != 0 || request.files_only) return {};
  format::CommitInput input = {.checkpoint = request.name,
                               .attempt = attempt,
                               .parent = request.parent,
                               .world_size = options.world_size,
                               .step = request.step,
                               .saved_at_ns = saved_at_ns};
  if (input.parent == AttemptId{}) {
    const base::MutexLock lock(&mutex_);
    input.parent = last_;
  }
  return format::BuildCommitRecord(input);
}

}  // namespace holdfast::checkpointer
