// Everything about one save that its handle, the stager and the supervisor share.
#ifndef HOLDFAST_RUNTIME_WRITER_SAVE_STATE_H_
#define HOLDFAST_RUNTIME_WRITER_SAVE_STATE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/checksums.h"
#include "runtime/writer/job_table.h"
#include "runtime/writer/worker_link.h"

namespace holdfast {

/// One save. Made by the caller's thread; the fields of the first block do not change once the
/// supervisor knows it.
class SaveState {
 public:
  base::ForkGuard guard;
  std::shared_ptr<const format::PackedPlan> plan;  // shared with saves of the same structure
  std::string head;  // a literal of this save alone: see SafetensorsStructure::HeadFor
  std::set<std::pair<Device*, StreamHandle>> streams;  // that last wrote its tensors
  std::unique_ptr<writer::JobTable> table;
  std::unique_ptr<writer::Checksums> checksums;  // null if the plan has no places for any
  std::shared_ptr<writer::WorkerLink> link;
  std::shared_ptr<const base::UniqueFd> parent;  // the directory above the checkpoint
  base::UniqueFd in_use;        // the partial directory, locked: shared with the worker
  base::UniqueFd trainer_lock;  // and the lock that says that the trainer itself lives
  std::string checkpoint;
  std::string partial;
  std::string path;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint64_t bytes_total = 0;
  uint64_t bytes_to_lease = 0;  // each file rounded up
  uint64_t entered_ns = 0;      // on the monotonic clock, as the worker's times
  // A process that was killed in a direct write ends after that write on this file system.
  bool writes_end_with_process = false;
  std::function<void()> wake_supervisor;
  const void* owner = nullptr;  // whose save it is, for Supervisor::WaitIdle
  /// Called from the supervisor's thread when the save has ended and its memory was let go, before
  /// Called from the supervisor's thread when the save has ended and its memory was let go, before
  /// anybody is woken. `worker_left_files`: the worker died without a result, so its partial files
  /// are still there. Returns how the save has ended: OK where a worker that died had committed it.
  std::function<absl::Status(const std::shared_ptr<SaveState>&, const absl::Status&,
                             bool worker_left_files)>
      on_finished;
  /// Called likewise when the save was given up though it has not ended (it is quarantined).
  std::function<void(const std::shared_ptr<SaveState>&, const absl::Status&)> on_given_up;

  // The staging side: one entry per extent, written before the extent is published.
  std::vector<staging::Lease> leases;
  layout::LogWriter published;
  /// Extents that have no lease yet; the one who takes the last tells the pool that this epoch
  /// wants no more.
  std::atomic<uint32_t> extents_to_lease{0};
  /// Extents not yet sealed; the one who seals the last marks the save as staged.
  std::atomic<uint32_t> extents_to_seal{0};
  /// Threads and queued tasks that may still touch this save's leases: the caller, device copies,
  /// sealers. The epoch is retired only at zero, whatever became of the worker.
  std::atomic<uint32_t> users{0};
  std::atomic<uint64_t> bytes_sealed{0};
  std::atomic<uint64_t> cpu_sealing_ns{0};
  std::atomic<uint64_t> time_waiting_memory_ns{0};
  /// Device copies that were not queued yet; 0 lets WaitStagedOn record its event.
  std::atomic<uint32_t> device_extents_to_queue{0};

  // The supervisor's alone.
  layout::LogReader acknowledged;
  uint64_t progress_seen = 0;
  uint64_t progress_at_ns = 0;
  uint64_t gone_at_ns = 0;  // 0: the worker was not seen gone yet
  bool killed = false;
  bool retired = false;                  // its staging memory was given back
  absl::Status worker_damage;            // its log holds what no sound worker writes
  std::atomic<bool> quarantined{false};  // read by anybody

  /// Gives up staging: no further extent is published, the worker cleans up. The first failure
  /// stays.
  void FailStaging(const absl::Status& why);
  bool StagingFailed() const {
    return table->job()->trainer_failed.load(std::memory_order_relaxed) != 0;
  }

  void AddUser() { users.fetch_add(1, std::memory_order_relaxed); }
  /// The caller touches no lease of this save any more.
  void DropUser();

  void MarkStaged();
  void NotifyQueued();
  /// Final: fills the report and wakes everybody. Called once, after the leases were retired (or
  /// quarantined).
  void Finish(const absl::Status& status);

  absl::Status WaitStaged(absl::Duration timeout);
  absl::Status WaitQueued(absl::Duration timeout);
  absl::StatusOr<SaveReport> WaitDurable(absl::Duration timeout);
  bool IsDone();
  SaveProgress Progress();
  int WorkerPid();
  base::FailureNames Names() const;
  /// For messages: the tensor of a piece, or what stands for one.
  std::string TensorName(uint32_t tensor) const;
  SaveReport* MutableReport() { return &report_; }  // before the supervisor knows the save
  absl::Status StagingStatus();
  /// The save's own error if no WaitDurable has returned it yet; marks it as returned.
  absl::Status TakeUnseenError();
  bool ErrorWasSeen();
  /// The call that started the save has returned its error itself.
  void MarkErrorReturned();
  /// The name that the replaced checkpoint has now; empty if there is none. Before
  /// ReleaseResources.
  std::string LeftBehind() const;
  /// Asks the worker to stop.
  void Cancel();
  /// Gives the control memory and the worker back; after Finish, by the supervisor. A handle may
  /// live on for long.
  void ReleaseResources();

 private:
  SaveProgress ReadProgress() const;

  base::Mutex mutex_;
  base::Condition changed_;
  bool staged_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  bool seen_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status staging_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  SaveProgress last_progress_ ABSL_GUARDED_BY(mutex_);
  SaveReport report_;  // written before the save is watched, then by Finish; read once done_
};

}  // namespace holdfast

#endif  // HOLDFAST_RUNTIME_WRITER_SAVE_STATE_H_
