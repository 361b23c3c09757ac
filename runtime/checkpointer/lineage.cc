#include "runtime/checkpointer/lineage.h"

#include <algorithm>

#include "absl/time/time.h"
#include "runtime/directory/listing.h"

namespace holdfast::checkpointer {

void Lineage::Begin(int directory) {
  const CheckpointInfo newest = directory::NewestRecorded(directory);
  const base::MutexLock lock(&mutex_);
  last_ = newest.attempt;
  if (newest.attempt == AttemptId{}) return;
  last_saved_at_ns_ = static_cast<uint64_t>(std::max<int64_t>(0, absl::ToUnixNanos(newest.saved_at)));
}

uint64_t Lineage::SavedAtNs(uint64_t now_ns) {
  const base::MutexLock lock(&mutex_);
  last_saved_at_ns_ = std::max(now_ns, last_saved_at_ns_ + 1);
  return last_saved_at_ns_;
}

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
