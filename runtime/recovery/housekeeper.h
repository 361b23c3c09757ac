// Background deletion of checkpoints that retention removes, and of killed workers' leftovers.
#ifndef HOLDFAST_RUNTIME_RECOVERY_HOUSEKEEPER_H_
#define HOLDFAST_RUNTIME_RECOVERY_HOUSEKEEPER_H_

#include <cstdint>
#include <deque>
#include <map>
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

  /// Applies the retention options to the series of save `name`, which has become durable and was
  /// called at `called_ns`. The save of this process that was called last stays in any case; one
  /// that ends behind later ones may go at once. Tries again for some seconds where another save
  /// holds a checkpoint that is to go.
  void ApplyRetention(const Parent& parent, const std::string& name, uint64_t called_ns);

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
    std::string name;  // directory to remove, or name of the durable save that was called last
    directory::PartialDirectory locks;
    absl::Time until = absl::InfiniteFuture();  // end of the tries while a lock is held
    bool held = false;                          // by another save or process
  };
  struct Durable {
    uint64_t called_ns = 0;
    std::string name;
  };
  void Queue(Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();
  absl::Status Do(Task* task);
  /// \param[out] held Only checkpoints that other saves hold are left to be removed.
  absl::Status Retire(int parent, const std::string& saved, bool* held);
  absl::Status Delete(int parent, const std::vector<std::string>& names, int lock);

  const CheckpointerOptions& options_;
  writer::WorkerSource* workers_;
  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::deque<Task> waiting_ ABSL_GUARDED_BY(mutex_);               // for locks
  std::map<std::string, Durable> latest_ ABSL_GUARDED_BY(mutex_);  // by series
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status first_error_ ABSL_GUARDED_BY(mutex_);
  base::Thread thread_;  // started by the first task: most front doors have none
};

}  // namespace holdfast::recovery

#endif  // HOLDFAST_RUNTIME_RECOVERY_HOUSEKEEPER_H_
