// The trainer's side of every save in flight: releases what a streaming worker acknowledged, joins
// workers that ended, and only then lets memory go.
#ifndef HOLDFAST_RUNTIME_WRITER_SUPERVISOR_H_
#define HOLDFAST_RUNTIME_WRITER_SUPERVISOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/base/unique_fd.h"
#include "runtime/staging/staging_pool.h"
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
  /// What belongs to saves that could not be stopped stays until the process ends.
  ~Supervisor();

  /// Waits for every save in flight; each ends by its own deadlines. False: some worker could not
  /// be stopped, its memory is quarantined and must stay mapped.
  bool Stop();

  /// From now on the save is the supervisor's to end. Its worker is running.
  void Watch(std::shared_ptr<SaveState> save);

  /// Looks at all saves soon.
  void Wake();

  /// Waits until no save of `owner` is in flight; those that can never end (quarantined) are not
  /// waited for. \error kDeadlineExceeded.
  absl::Status WaitIdle(const void* owner, absl::Time deadline);

  /// Saves that go on. One that has ended may still have memory in quarantine.
  uint64_t in_flight();

 private:
  Supervisor(staging::StagingPool* pool, const SupervisorOptions& options);
  void Run();
  using Saves = std::vector<std::shared_ptr<SaveState>>;
  void PollOnce(const Saves& saves);
  bool Service(const std::shared_ptr<SaveState>& save, const Saves& saves);
  static bool IsQueued(const SaveState& save, const Saves& saves);
  /// For how long neither side of the save has got on, in ns.
  static uint64_t TimeWithoutProgress(SaveState* save);
  void ReleaseAcknowledged(SaveState* save);
  void CheckStalled(const std::shared_ptr<SaveState>& save);
  void Quarantine(const std::shared_ptr<SaveState>& save, const absl::Status& why);
  void StopStaging(const std::shared_ptr<SaveState>& save, const absl::Status& outcome);
  bool End(const std::shared_ptr<SaveState>& save, bool gone);
  /// Whether every transfer that can touch the save's staging memory has provably landed.
  void EndAsserted(const std::shared_ptr<SaveState>& save);
  static bool HasLanded(const SaveState& save, bool gone);
  /// Gives the staging memory back once nothing can touch it any more, the trainer included.
  void RetireIfLanded(SaveState* save, bool gone);
  /// The worker is gone, but its transfers may not have landed: ends the save, keeps its memory.
  void AwaitLanding(const std::shared_ptr<SaveState>& save, const absl::Status& outcome);
  absl::Status Outcome(SaveState* save, bool gone, bool* left_files);
  void TrimIfIdle();

  staging::StagingPool* pool_;
  SupervisorOptions options_;
  base::UniqueFd wake_;
  base::Mutex mutex_;
  base::Condition changed_;
  Saves saves_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  base::Thread thread_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_SUPERVISOR_H_
