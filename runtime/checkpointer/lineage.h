// The parent checkpoint and the time of a save, and the commit record that holds both.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_LINEAGE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_LINEAGE_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "holdfast/checkpointer.h"
#include "runtime/base/mutex.h"
#include "runtime/format/commit_record.h"

namespace holdfast::checkpointer {

/// \threadsafety All methods may be called from any thread.
class Lineage {
 public:
  /// Begins with the newest committed checkpoint of an open directory.
  void Begin(int directory);

  /// Returns the time for the records of a save that begins now: `now_ns`, or a microsecond after
  /// the latest save where the clock stands behind. The order of checkpoints is the order of these
  /// times, also after a restart on a machine whose clock is late.
  uint64_t SavedAtNs(uint64_t now_ns);

  /// Sets the parent of later saves to `attempt`, which has committed through this front door.
  void Committed(const AttemptId& attempt);

  /// Builds the template of a save's record; empty for a rank that does not commit.
  format::CommitTemplate RecordOf(const CheckpointerOptions& options, const SaveRequest& request,
                                  const AttemptId& attempt, uint64_t saved_at_ns) const;

 private:
  mutable base::Mutex mutex_;
  AttemptId last_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_saved_at_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_LINEAGE_H_
