// Stages device tensors: a thread behind the caller starts their copies, waits for the copies, and
// hands the extents to the sealer.
#ifndef HOLDFAST_RUNTIME_WRITER_DEVICE_STAGER_H_
#define HOLDFAST_RUNTIME_WRITER_DEVICE_STAGER_H_

#include <deque>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/lease_taker.h"
#include "runtime/writer/save_state.h"
#include "runtime/writer/sealer.h"

namespace holdfast::writer {

/// The thread serves all saves in turn and never waits for a single save. Extents of any save may
/// hold the memory for the next extent, and only this thread can finish those extents.
class DeviceStager {
 public:
  DeviceStager(staging::StagingPool* pool, Sealer* sealer, LeaseTaker* leases);
  /// Requires that every save was staged or has failed. Unfinished copies of failed saves go on:
  /// their memory must stay mapped.
  ~DeviceStager();

  absl::Status Start();

  /// Hands extent `index` over. `leased`: the extent has its lease, and its host tensors are
  /// copied; otherwise the extent has no host tensors. The save gains a user until the extent
  /// reaches the sealer.
  void Enqueue(std::shared_ptr<SaveState> save, uint32_t index, bool leased);

 private:
  /// An extent whose device pieces are under way.
  struct Copying {
    uint32_t index = 0;
    std::vector<std::pair<Device*, CopyTicket>> copies;
  };
  /// The open work of one save.
  struct Work {
    std::shared_ptr<SaveState> save;
    std::deque<uint32_t> leased;    // first, because these extents hold memory
    std::deque<uint32_t> unleased;  // in order
    std::deque<Copying> copying;
    bool empty() const { return leased.empty() && unleased.empty() && copying.empty(); }
    bool failed() const { return save->StagingFailed(); }  // not to be asked when empty
  };
  struct Entry {
    std::shared_ptr<SaveState> save;
    uint32_t index = 0;
    bool leased = false;
  };

  void Run();
  /// Sorts new entries into `works_`; waits for an entry if there is no work. Returns false at the
  /// end.
  bool TakeEntries();
  /// Does all possible work of a save without waiting. Returns true if any work was done.
  absl::StatusOr<bool> Step(Work* work);
  /// Sleeps for a moment on the work that is likely to end first, when no work is possible.
  void Rest();
  absl::Status RestWith(Work* work);
  absl::Status StartCopies(Work* work, uint32_t index);
  absl::StatusOr<bool> FinishOldest(Work* work, absl::Duration timeout);
  void Fail(Work* work, const absl::Status& status);
  /// Drops the extents of a failed save that have not begun. Extents of a begun device copy stay in
  /// use until the copy has ended with any status. Returns true if any extent was dropped.
  bool GiveUp(Work* work);

  staging::StagingPool* pool_;
  Sealer* sealer_;
  LeaseTaker* leases_;
  std::list<Work> works_;   // the thread's own
  absl::Time progress_at_;  // the thread's own: of any save
  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  base::Thread thread_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_DEVICE_STAGER_H_
