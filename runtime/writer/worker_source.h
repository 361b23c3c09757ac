// The source of a save's worker: a new worker, or the kept worker.
#ifndef HOLDFAST_RUNTIME_WRITER_WORKER_SOURCE_H_
#define HOLDFAST_RUNTIME_WRITER_WORKER_SOURCE_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "runtime/base/mutex.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/job_table.h"
#include "runtime/writer/worker_link.h"

namespace holdfast::writer {

/// \threadsafety All methods may be called from any thread.
class WorkerSource {
 public:
  WorkerSource(staging::StagingPool* pool, Launcher launcher, std::string program);
  ~WorkerSource();

  /// Starts the kept worker ahead of the first save (a no-op for spawn and fork).
  absl::Status WarmUp();

  /// Starts a job on a worker. Spawn and fork: a new worker; persistent and thread: the kept
  /// worker, started anew if it has died.
  absl::StatusOr<std::shared_ptr<WorkerLink>> Start(const std::string& title, const JobTable& table,
                                                    int parent_fd, int lock_fd);

  /// Starts a background job on a new worker with any launcher: a kept worker must stay free for
  /// the next save. The worker holds the lock of `lock_fd`, if any, until it ends.
  absl::StatusOr<std::shared_ptr<WorkerLink>> StartBackground(const std::string& title,
                                                              const JobTable& table, int parent_fd,
                                                              int lock_fd);

 private:
  absl::StatusOr<std::shared_ptr<WorkerLink>> Launch(Launcher launcher, const std::string& title);
  absl::StatusOr<std::shared_ptr<WorkerLink>> Kept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetKept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  staging::StagingPool* pool_;
  Launcher launcher_;
  std::string program_;
  base::Mutex mutex_;
  std::shared_ptr<WorkerLink> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_WORKER_SOURCE_H_
