// Deleting in the background: what retention lets go, and what killed workers left behind.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_HOUSEKEEPER_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_HOUSEKEEPER_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "holdfast/checkpointer.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/writer/worker_source.h"

namespace holdfast::checkpointer {

/// Deleting costs a quarter of a second per GiB, so it is never done by anybody that a save waits
/// for: a thread of the housekeeper's decides, a worker of its own deletes.
class Housekeeper {
 public:
  /// `parent_fd` is the checkpoints' directory and outlives the housekeeper.
  Housekeeper(const CheckpointerOptions& options, int parent_fd, writer::WorkerSource* workers);
  ~Housekeeper();  // finishes what was asked for

  absl::Status Start();

  /// Save `name` has become durable: apply the retention options. It stays itself, whatever its
  /// step: a run that was rolled back saves below the steps that are there.
  void ApplyRetention(const std::string& name);

  /// Remove a directory that no living save owns.
  void Remove(const std::string& name);

  /// \error kDeadlineExceeded; otherwise the first error since the last call.
  absl::Status WaitIdle(absl::Time deadline);

 private:
  struct Task {
    bool retention = false;
    std::string name;  // what to remove, or what has just become durable
  };
  void Run();
  absl::Status Do(const Task& task);
  absl::Status Retire(const std::string& newest);
  absl::Status Delete(const std::vector<std::string>& names);

  const CheckpointerOptions& options_;
  int parent_fd_;
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
