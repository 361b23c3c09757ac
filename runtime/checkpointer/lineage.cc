#include "runtime/checkpointer/lineage.h"

#include <algorithm>

#include "runtime/directory/listing.h"
#include "runtime/format/directory_names.h"

namespace holdfast::checkpointer {
namespace {

// A microsecond: also a reader with the time in seconds as a double sees the order.
constexpr uint64_t kStepNs = 1000;

}  // namespace

void Lineage::Begin(int directory) {
  const directory::Recorded recorded = directory::ReadRecorded(directory);
  const base::MutexLock lock(&mutex_);
  line_.clear();
  newest_.clear();
  for (const auto& [series, checkpoint] : recorded.newest) newest_[series] = checkpoint.attempt;
  last_saved_at_ns_ = recorded.latest_ns;
}

uint64_t Lineage::SavedAtNs(uint64_t now_ns, uint64_t after_ns) {
  const base::MutexLock lock(&mutex_);
  last_saved_at_ns_ = std::max(now_ns, std::max(last_saved_at_ns_, after_ns) + kStepNs);
  return last_saved_at_ns_;
}

format::CommitTemplate Lineage::Record(const AttemptId& asked, format::ManifestInput* manifest) {
  {
    const base::MutexLock lock(&mutex_);
    manifest->parent = asked == AttemptId{} ? LastOf(manifest->checkpoint) : asked;
    line_.push_back(manifest->attempt);
  }
  return format::BuildCommitRecord({.checkpoint = manifest->checkpoint,
                                    .attempt = manifest->attempt,
                                    .parent = manifest->parent,
                                    .world_size = manifest->world_size,
                                    .step = manifest->step,
                                    .saved_at_ns = manifest->saved_at_ns});
}

AttemptId Lineage::LastOf(const std::string& checkpoint) const {
  if (!line_.empty()) return line_.back();
  const auto newest = newest_.find(format::SeriesOf(checkpoint));
  return newest == newest_.end() ? AttemptId{} : newest->second;
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
