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
  line_ = {recorded.newest.attempt};
  last_saved_at_ns_ = recorded.latest_ns;
}

uint64_t Lineage::SavedAtNs(uint64_t now_ns) {
  const base::MutexLock lock(&mutex_);
  last_saved_at_ns_ = std::max(now_ns, last_saved_at_ns_ + kStepNs);
  return last_saved_at_ns_;
}

format::CommitTemplate Lineage::RecordOf(const CheckpointerOptions& options,
                                         const SaveRequest& request, const AttemptId& attempt,
                                         uint64_t saved_at_ns) {
  // In a framework's directory the framework's own last file commits.
  if (options.rank != 0 || request.files_only || request.single_file) return {};
  format::CommitInput input = {.checkpoint = request.name,
                               .attempt = attempt,
                               .parent = request.parent,
                               .world_size = options.world_size,
                               .step = request.step,
                               .saved_at_ns = saved_at_ns};
  {
    const base::MutexLock lock(&mutex_);
    if (input.parent == AttemptId{} && !line_.empty()) input.parent = line_.back();
    line_.push_back(attempt);
  }
  return format::BuildCommitRecord(input);
}

void Lineage::Ended(const AttemptId& attempt, bool committed) {
  const base::MutexLock lock(&mutex_);
  const auto found = std::find(line_.begin(), line_.end(), attempt);
  if (found == line_.end()) return;
  if (committed) {
    line_.erase(line_.begin(), found);
  } else {
    line_.erase(found);
  }
}

}  // namespace holdfast::checkpointer
