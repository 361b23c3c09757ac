// Deleting in the background: what retention lets go, and what killed workers left behind.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_HOUSEKEEPER_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_HOUSEKEEPER_H_

#include <cstdint>
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
#include "runtime/writer/worker_source.h"

namespace holdfast::checkpointer {

/// Deleting costs a quarter of a second per GiB, so it is never done by anybody that a save waits
/// for: a thread of the housekeeper's decides, a worker of its own deletes.
class Housekeeper {
 public:
  /// The directory of the checkpoints that a task is about, open.
  using Parent = std::shared_ptr<const base::UniqueFd>;

  Housekeeper(const CheckpointerOptions& options, writer::WorkerSource* workers);
  ~Housekeeper();  // finishes what was asked for

  absl::Status Start();

  /// Save `name` has become durable: apply the retention options to its series.
  void ApplyRetention(const Parent& parent, const std::string& name);

  /// Remove a directory that no living save owns.
  void Remove(const Parent& parent, const std::string& name);

  /// \error kDeadlineExceeded; otherwise the first error since the last call.
  absl::Status WaitIdle(absl::Time deadline);

 private:
  struct Task {
    bool retention = false;
    Parent parent;
    std::string name;  // what to remove, or what has just become durable
  };
  void Run();
  absl::Status Do(const Task& task);
  absl::Status Retire(int parent, const std::string& saved);
  absl::Status Delete(int parent, const std::vector<std::string>& names);

  const CheckpointerOptions& options_;
  writer::WorkerSource* workers_;
  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status first_error_ ABSL_GUARDED_BY(mutex_);
  base::Thread thread_;
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_HOUSEKEEPER_H_
