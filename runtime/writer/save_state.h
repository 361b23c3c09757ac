// The state of one save, shared by its handle, the stager and the supervisor.
#ifndef HOLDFAST_RUNTIME_WRITER_SAVE_STATE_H_
#define HOLDFAST_RUNTIME_WRITER_SAVE_STATE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "holdfast/device.h"
#include "holdfast/save.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/format/packed_plan.h"
#include "runtime/layout/job.h"
#include "runtime/staging/lease.h"
#include "runtime/sys/own_gap.h"
#include "runtime/writer/checksums.h"
#include "runtime/writer/job_table.h"
#include "runtime/writer/worker_link.h"

namespace holdfast {

/// One save. The caller's thread makes it; the fields of the first block are constant after Watch.
class SaveState {
 public:
  base::ForkGuard guard;
  std::shared_ptr<const format::PackedPlan> plan;  // shared with saves of the same structure
  std::string head;  // a literal of this save alone: see SafetensorsStructure::HeadFor
  std::set<std::pair<Device*, StreamHandle>> streams;  // the last writers of its tensors
  std::unique_ptr<writer::JobTable> table;
  std::unique_ptr<writer::Checksums> checksums;  // null if the plan has no places for any
  std::shared_ptr<writer::WorkerLink> link;
  std::shared_ptr<const base::UniqueFd> parent;  // the directory above the checkpoint
  base::UniqueFd in_use;        // the partial directory or file, locked: shared with the worker
  base::UniqueFd trainer_lock;  // and the lock that proves that the trainer lives
  std::string checkpoint;
  std::string partial;
  bool single_file = false;  // `checkpoint` is a file, and `parent` its directory
  std::string path;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint64_t bytes_total = 0;
  uint64_t bytes_to_lease = 0;  // each file rounded up
  uint64_t entered_ns = 0;      // on the monotonic clock, as the worker's times
  // On this file system a killed process ends after its direct write.
  bool writes_end_with_process = false;
  bool stable_inodes = false;       // see directory::FileSystem
  bool needs_confirmation = false;  // the last extent is published by Confirm
  std::function<void()> wake_supervisor;
  const void* owner = nullptr;  // the save's owner, for Supervisor::WaitIdle
  /// Called on a thread of Endings when the save has ended and its memory was released, before any
  /// waiter is woken. May block. `worker_left_files`: the worker died without a result, so its
  /// partial files are still present. Returns the final status of the save: OK if a dead worker had
  /// committed it.
  std::function<absl::Status(const std::shared_ptr<SaveState>&, const absl::Status&,
                             bool worker_left_files)>
      on_finished;
  /// Called likewise when a save was given up before its end (quarantined); never at the same time.
  /// Does not block.
  std::function<void(const std::shared_ptr<SaveState>&)> on_given_up;
  /// Called after on_given_up, once the waiters are woken. May block: the file system may hang.
  std::function<void(const absl::Status&)> tell_ranks;

  // The staging side: one entry per extent, written before the extent is published.
  std::vector<staging::Lease> leases;
  layout::LogWriter published;
  /// Extents without a lease. The thread that takes the last lease tells the pool that the epoch
  /// needs no more memory.
  std::atomic<uint32_t> extents_to_lease{0};
  /// Extents not yet sealed; the thread that seals the last extent marks the save as staged.
  std::atomic<uint32_t> extents_to_seal{0};
  /// Threads and queued tasks that may still touch this save's leases: the caller, device copies,
  /// sealers. The epoch is retired only at zero, regardless of the worker's state.
  std::atomic<uint32_t> users{0};
  std::atomic<uint64_t> bytes_sealed{0};
  std::atomic<uint64_t> cpu_sealing_ns{0};
  std::atomic<uint64_t> time_waiting_memory_ns{0};
  /// Device copies that were not queued yet; 0 lets WaitStagedOn record its event.
  std::atomic<uint32_t> device_extents_to_queue{0};

  /// A thread of Endings has the save, and the supervisor leaves the save alone.
  std::atomic<bool> ending{false};

  // The supervisor's alone.
  layout::LogReader acknowledged;
  std::optional<writer::Completion> result;  // the worker's, checked
  uint64_t progress_seen = 0;
  uint64_t progress_at_ns = 0;
  sys::OwnGap gap;
  uint64_t gone_at_ns = 0;  // 0: the worker was not seen gone yet
  bool killed = false;
  bool retired = false;  // its staging memory was released
  /// Set when the worker has written an impossible value to the table. Later values of a worker
  /// process do not count.
  absl::Status worker_damage;
  std::atomic<bool> quarantined{false};  // read by any thread

  /// Gives up staging: no further extent is published, the worker cleans up. The first failure
  /// stays.
  void FailStaging(const absl::Status& why);
  bool StagingFailed() const { return staging_failed_.load(std::memory_order_relaxed); }

  void AddUser() { users.fetch_add(1, std::memory_order_relaxed); }
  /// Removes the caller from the users of this save's leases.
  void DropUser();

  /// Appends an extent to the worker's log of sealed extents.
  void Publish(uint32_t index);
  /// Marks the save as staged. Publishes its last extent, or leaves that to Confirm.
  void MarkStaged(std::optional<uint32_t> last_extent);
  void Confirm(const absl::Status& capture);
  void NotifyQueued();
  /// Fills the report and wakes all waiters. Called once, after the leases were retired or
  /// quarantined.
  void Finish(const absl::Status& status);

  absl::Status WaitStaged(absl::Duration timeout);
  absl::Status WaitQueued(absl::Duration timeout);
  absl::StatusOr<SaveReport> WaitDurable(absl::Duration timeout);
  bool IsDone();
  SaveProgress Progress();
  int WorkerPid();
  base::FailureNames Names() const;
  /// Returns the name of the piece's tensor, or a substitute, for messages.
  std::string TensorName(uint32_t tensor) const;
  SaveReport* MutableReport() { return &report_; }  // before the supervisor knows the save
  absl::Status StagingStatus();
  /// Returns the save's own error if no WaitDurable has returned the error yet, and marks the error
  /// as returned.
  absl::Status TakeUnseenError();
  bool ErrorWasSeen();
  /// Marks the error as returned by the call that started the save.
  void MarkErrorReturned();
  /// Asks the worker to stop.
  void Cancel();
  /// Gives the control memory, the worker, the descriptors and the callbacks back; after Finish. A
  /// handle may live on for long.
  void ReleaseResources();

 private:
  void FailStagingLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SaveProgress ReadProgress() const;

  std::atomic<bool> staging_failed_{false};
  base::Mutex mutex_;
  base::Condition changed_;
  bool staged_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  bool seen_ ABSL_GUARDED_BY(mutex_) = false;
  bool confirmed_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<uint32_t> unconfirmed_ ABSL_GUARDED_BY(mutex_);  // the last extent
  absl::Status staging_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  SaveProgress last_progress_ ABSL_GUARDED_BY(mutex_);
  SaveReport report_;  // written before the save is watched, then by Finish; read once done_
};

}  // namespace holdfast

#endif  // HOLDFAST_RUNTIME_WRITER_SAVE_STATE_H_
