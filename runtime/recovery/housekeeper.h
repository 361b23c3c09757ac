// Background deletion of checkpoints that retention removes, and of killed workers' leftovers.
#ifndef HOLDFAST_RUNTIME_RECOVERY_HOUSEKEEPER_H_
#define HOLDFAST_RUNTIME_RECOVERY_HOUSEKEEPER_H_

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "holdfast/checkpointer.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/locks.h"
#include "runtime/writer/worker_source.h"

namespace holdfast::recovery {

/// Deleting costs a quarter of a second per GiB, so no thread on a save's path deletes. A thread of
/// the housekeeper decides, and a separate worker deletes.
class Housekeeper {
 public:
  /// The open directory of a task's checkpoints.
  using Parent = std::shared_ptr<const base::UniqueFd>;

  Housekeeper(const CheckpointerOptions& options, writer::WorkerSource* workers);
  ~Housekeeper();  // finishes the queued tasks

  /// Applies the retention options to the series of save `name`, which has become durable.
  void ApplyRetention(const Parent& parent, const std::string& name);

  /// Removes a directory without a living save. `locks`: of a partial directory, held until it is
  /// gone. It may be complete, and a recovery would promote it during its removal.
  void Remove(const Parent& parent, const std::string& name,
              directory::PartialDirectory locks = {});

  /// Removes the partial directory of a save whose ranks have all failed, once no process uses it:
  /// see directory::LockUnused. A complete directory stays for a recovery, and so does a directory
  /// that stays in use for long.
  void RemoveOnceUnused(const Parent& parent, const std::string& name);

  /// Waits for the queued tasks, except removals that wait for other ranks. \error
  /// kDeadlineExceeded; otherwise the first error since the last call.
  absl::Status WaitIdle(absl::Time deadline);

 private:
  enum class Kind { kRetention, kRemove, kRemoveOnceUnused };
  struct Task {
    Kind kind = Kind::kRemove;
    Parent parent;
    std::string name;  // directory to remove, or name of the durable save
    directory::PartialDirectory locks;
    absl::Time until = absl::InfiniteFuture();  // a directory in use is tried again until then
  };
  void Queue(Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run();
  absl::Status Do(Task* task);
  absl::Status Retire(int parent, const std::string& saved);
  absl::Status Delete(int parent, const std::vector<std::string>& names, int lock);

  const CheckpointerOptions& options_;
  writer::WorkerSource* workers_;
  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::deque<Task> waiting_ ABSL_GUARDED_BY(mutex_);  // for other ranks' locks
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status first_error_ ABSL_GUARDED_BY(mutex_);
  base::Thread thread_;  // started by the first task: most front doors have none
};

}  // namespace holdfast::recovery

#endif  // HOLDFAST_RUNTIME_RECOVERY_HOUSEKEEPER_H_
