// Saves that have failed, until the caller learns of the error: Flush returns the errors that no
// WaitDurable has returned.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_UNSEEN_ERRORS_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_UNSEEN_ERRORS_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "runtime/base/mutex.h"
#include "runtime/writer/save_state.h"

namespace holdfast::checkpointer {

/// \threadsafety All methods may be called from any thread.
class UnseenErrors {
 public:
  /// Keeps a failed save, ended or about to end. Keeps a bounded number, the first ones.
  void Keep(const std::shared_ptr<SaveState>& save);

  /// Returns the first unseen error and forgets the ended saves. OK without an error.
  absl::Status TakeFirst();

 private:
  base::Mutex mutex_;
  std::vector<std::shared_ptr<SaveState>> failed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_UNSEEN_ERRORS_H_
