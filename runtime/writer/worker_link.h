// One living worker of any launcher: its socket, its doorbells, and the proof of its end.
#ifndef HOLDFAST_RUNTIME_WRITER_WORKER_LINK_H_
#define HOLDFAST_RUNTIME_WRITER_WORKER_LINK_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/pod.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/base/unique_fd.h"
#include "runtime/layout/launcher.h"
#include "runtime/layout/wire.h"
#include "runtime/staging/residence.h"

namespace holdfast::writer {

struct LinkOptions {
  Launcher launcher = Launcher::kSpawn;
  std::string program;  ///< Of the spawned launchers.
  std::string title;    ///< The text that `ps` shows beside the program's name.
  bool kept = false;  ///< Serves any number of jobs (always so where the launcher's traits say so).
  int arena_fd = -1;
  uint64_t arena_bytes = 0;
  /// The limit for a kept worker to take a job; hundreds of jobs may be queued before.
  absl::Duration time_take_max = absl::Minutes(10);
};

/// One worker, started by its launcher: see layout/launcher.h.
///
/// \threadsafety Run, RingDoorbell, Exit, Reap and the registrant's calls may come from any thread.
class WorkerLink : public staging::Registrant {
 public:
  /// Starts a worker and attaches it to the arena. The worker does nothing before Run.
  /// \error kNotFound, kPermissionDenied (worker program), kResourceExhausted (processes, memory),
  /// ...
  static absl::StatusOr<std::shared_ptr<WorkerLink>> Launch(const LinkOptions& options);

  /// Asks a kept worker to end and waits for a thread to do so. A process is not waited for: Reap
  /// it.
  ~WorkerLink() override;
  WorkerLink(const WorkerLink&) = delete;
  WorkerLink& operator=(const WorkerLink&) = delete;

  /// Hands over a job: the worker's "go". The fds are duplicated by the kernel; the caller keeps
  /// its own.
  absl::Status Run(int control_fd, uint64_t control_bytes, int parent_fd, int lock_fd);

  /// Wakes the worker: new extents, a cancellation.
  void RingDoorbell();

  /// No further job will come.
  void Exit();

  bool kept() const { return kept_; }
  Launcher launcher() const { return launcher_; }
  pid_t pid() const;                                     ///< For a thread this process's.
  int pidfd() const { return pidfd_.get(); }             ///< -1 for a thread.
  int doorbell_fd() const { return to_trainer_.get(); }  ///< Readable when the worker has news.
  void DrainDoorbell();

  /// Returns true when the worker has ended: the pidfd is readable, or the thread has returned.
  /// Direct writes of the ring may still be under way in the kernel, and read staging memory.
  bool IsGone() const;

  /// Returns true when the worker's end of the socket is closed in the process and in the rings. A
  /// ring holds the socket until the ring's last transfer has landed.
  bool HasHungUp() const;
  int socket() const { return socket_.get(); }

  /// Takes the exit status after IsGone, and describes it: "exited with status 0", "killed by
  /// signal 9 (Killed)", or that the host took the status (waited for all children, or ignores
  /// SIGCHLD).
  std::string Reap();

  /// Gives the worker up: SIGKILL by pidfd, so that no recycled pid is ever hit. A thread goes on
  /// by itself. The worker gets no further job.
  void Kill();
  /// Kills the worker of a caller that waits no longer. A thread is asked to end after the job, and
  /// the link is kept for good: the destructor would wait for the thread.
  static void Abandon(std::shared_ptr<WorkerLink> link);
  bool given_up() const { return given_up_.load(std::memory_order_relaxed); }

  /// Registrant: a kept worker holds the arena's pages in its ring's registration and in its
  /// mapping.
  absl::Status DropRegistration() override;
  absl::Status RestoreRegistration() override;

 private:
  WorkerLink() = default;
  absl::Status Start(const LinkOptions& options);
  absl::Status WatchTrainer();
  absl::Status WatchWorker();
  absl::Status StartSpawned(const LinkOptions& options, base::UniqueFd worker_end);
  absl::Status StartForked(base::UniqueFd worker_end);
  absl::Status StartThread(base::UniqueFd worker_end);
  std::string TakeExitStatus();
  bool IsReaped();
  void ReapKilled();
  absl::Status WhyRefused(int error);
  absl::Status Attach();
  absl::Status UnlessGone(const absl::Status& status) const;
  absl::Status Send(layout::MessageKind kind, uint64_t bytes, const int* fds, int fd_count);

  Launcher launcher_ = Launcher::kSpawn;
  layout::LauncherTraits traits_;
  bool kept_ = false;
  int arena_fd_ = -1;
  absl::Duration time_take_max_;
  uint64_t arena_bytes_ = 0;
  std::atomic<bool> given_up_{false};
  pid_t pid_ = -1;
  base::UniqueFd socket_;
  base::UniqueFd pidfd_;
  base::UniqueFd trainer_watch_;  // the worker's: readable or hung up when the trainer has died
  base::UniqueFd trainer_end_;    // the other end, where a socket replaces the pidfd
  base::UniqueFd to_worker_;      // eventfds
  base::UniqueFd to_trainer_;
  base::UniqueFd ended_;               // eventfd, a thread's stand-in for a pidfd
  std::atomic<int> thread_status_{0};  // what a process would exit with
  base::Thread thread_;
  base::Mutex reap_mutex_;
  std::string exit_text_ ABSL_GUARDED_BY(reap_mutex_);
  base::Mutex send_mutex_;  // one message at a time, so that a detach gets the right answer
  base::ForkGuard guard_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_WORKER_LINK_H_
