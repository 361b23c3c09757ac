// The trainer's side of every save in flight. Releases bytes that a streaming worker acknowledged,
// joins ended workers, and only then releases the memory.
#ifndef HOLDFAST_RUNTIME_WRITER_SUPERVISOR_H_
#define HOLDFAST_RUNTIME_WRITER_SUPERVISOR_H_

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/base/unique_fd.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/endings.h"
#include "runtime/writer/save_state.h"

namespace holdfast::writer {

struct SupervisorOptions {
  absl::Duration time_stalled_max = absl::Minutes(10);
  absl::Duration idle_trim = absl::InfiniteDuration();
};

class Supervisor {
 public:
  static absl::StatusOr<std::unique_ptr<Supervisor>> Start(staging::StagingPool* pool,
                                                           const SupervisorOptions& options);
  /// Waits until every save has ended and its staging memory was released: without end for a
  /// stuck thread or device.
  ~Supervisor();

  /// Hands the save, whose worker is running, to the supervisor, which ends it.
  void Watch(std::shared_ptr<SaveState> save);

  /// Starts a look at all saves.
  void Wake();

  /// Waits until no save of `owner` is in flight, without regard to quarantined saves. \error
  /// kDeadlineExceeded.
  absl::Status WaitIdle(const void* owner, absl::Time deadline);

  /// Returns true while the trainer or a transfer may touch staging memory.
  bool HasSaves();

  /// Returns true while copies may still write staging memory. With the stager gone they have no
  /// end.
  bool HasUsers();

  /// Returns the number of unfinished saves. A finished save may still have memory in quarantine.
  uint64_t in_flight();

 private:
  Supervisor(staging::StagingPool* pool, const SupervisorOptions& options);
  void Run();
  using Saves = std::vector<std::shared_ptr<SaveState>>;
  void PollOnce();
  void Service(const std::shared_ptr<SaveState>& save);
  bool IsQueued(const SaveState& save) const;
  /// For how long neither side of the save has got on, in ns.
  static uint64_t TimeWithoutProgress(SaveState* save);
  /// Takes the worker's result, and checks the states that the worker has written to the table.
  void ReadTable(SaveState* save);
  /// Fails the save of a damaged worker and stops the worker. `what`: a clause behind "its worker".
  void AbortStaging(SaveState* save, const absl::Status& why);
  void CallDamaged(SaveState* save, absl::string_view what);
  void ReleaseAcknowledged(SaveState* save);
  void CheckStalled(const std::shared_ptr<SaveState>& save);
  void Quarantine(const std::shared_ptr<SaveState>& save, const absl::Status& why);
  void StopStaging(const std::shared_ptr<SaveState>& save, const absl::Status& outcome);
  void End(const std::shared_ptr<SaveState>& save, bool gone);
  /// Hands the save to a thread of its own until `steps` return.
  void HandOver(const std::shared_ptr<SaveState>& save, std::function<void()> steps);
  void EndAsserted(const std::shared_ptr<SaveState>& save);
  /// Returns true when every transfer that can touch the save's staging memory has provably landed.
  static bool HasLanded(const SaveState& save, bool gone);
  /// Releases the staging memory once neither transfers nor the trainer can touch it.
  void RetireIfLanded(SaveState* save, bool gone);
  /// Ends the save of a dead worker, and keeps its memory because transfers may not have landed.
  void AwaitLanding(const std::shared_ptr<SaveState>& save, const absl::Status& outcome);
  absl::Status Outcome(SaveState* save, bool gone, bool* left_files);
  /// Of a worker that ended without a result.
  absl::Status WhyUnreported(const SaveState& save, const std::string& how) const;
  void TrimIfIdle();

  staging::StagingPool* pool_;
  SupervisorOptions options_;
  base::UniqueFd wake_;
  base::Mutex mutex_;
  base::Condition changed_;
  Saves saves_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Endings endings_;
  // Of the thread's present round. A round allocates no memory, up to a number of saves: the
  // training process may be out of memory for a moment.
  Saves round_;
  std::vector<pollfd> polled_;
  base::Thread thread_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_SUPERVISOR_H_
