// The parent checkpoint and the time of a save, and the commit record that holds both.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_LINEAGE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_LINEAGE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/checkpointer.h"
#include "runtime/base/mutex.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"

namespace holdfast::checkpointer {

/// \threadsafety All methods may be called from any thread.
class Lineage {
 public:
  /// Begins with the newest committed checkpoint of each series of an open directory.
  void Begin(int directory);

  /// Returns the time for the records of a save that begins now: `now_ns`, or a microsecond after
  /// the latest save and after `after_ns` where the clock stands behind. The order of checkpoints
  /// is the order of these times, also after a restart on a machine whose clock is late.
  uint64_t SavedAtNs(uint64_t now_ns, uint64_t after_ns);

  /// Completes rank 0's manifest with the parent: `asked`; where it is zero the last save, or else
  /// the newest of the series. Returns the template of the save's record, and makes the save the
  /// parent of later saves.
  format::CommitTemplate Record(const AttemptId& asked, format::ManifestInput* manifest);

  /// Ends a save. A failed save is no parent of later saves.
  void Ended(const AttemptId& attempt, bool committed);

 private:
  /// The last save, or else the newest of the checkpoint's series; zero where there is none.
  AttemptId LastOf(const std::string& checkpoint) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  std::map<std::string, AttemptId> newest_ ABSL_GUARDED_BY(mutex_);  // by series, at Begin
  /// The last committed save, and the later saves that have not ended, in the order of their
  /// calls. The last is the next save's parent: of two saves in flight the later call has the newer
  /// state.
  std::vector<AttemptId> line_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_saved_at_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_LINEAGE_H_
