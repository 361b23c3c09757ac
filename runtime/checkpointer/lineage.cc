#include "runtime/checkpointer/lineage.h"

#include <algorithm>

#include "runtime/directory/listing.h"

namespace holdfast::checkpointer {
namespace {

// A microsecond: also a reader with the time in seconds as a double sees the order.
constexpr uint64_t kStepNs = 1000;

}  // namespace

void Lineage::Begin(int directory) {
  const directory::Recorded recorded = directory::ReadRecorded(directory);
  const base::MutexLock lock(&mutex_);
  last_ = recorded.newest.attempt;
  last_saved_at_ns_ = recorded.latest_ns;
}

uint64_t Lineage::SavedAtNs(uint64_t now_ns) {
  const base::MutexLock lock(&mutex_);
  last_saved_at_ns_ = std::max(now_ns, last_saved_at_ns_ + kStepNs);
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
