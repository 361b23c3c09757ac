// Device tensors on their way into the arena: a thread behind the caller starts their copies, waits
// for them, and hands the extents to the sealer.
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

/// The thread serves all saves in turn and never waits for a single one: memory that one waits for
/// may be held by extents of another, or of its own, which only this thread can finish.
class DeviceStager {
 public:
  DeviceStager(staging::StagingPool* pool, Sealer* sealer, LeaseTaker* leases);
  /// After the last save was staged or failed. Copies of failed ones that have not ended are left:
  /// their memory must stay mapped.
  ~DeviceStager();

  absl::Status Start();

  /// Hands extent `index` over: `leased` if it has its lease, with its host tensors copied;
  /// otherwise it has no host tensors. The save gains a user until the extent went to the sealer.
  void Enqueue(std::shared_ptr<SaveState> save, uint32_t index, bool leased);

 private:
  /// An extent whose device pieces are under way.
  struct Copying {
    uint32_t index = 0;
    std::vector<std::pair<Device*, CopyTicket>> copies;
  };
  /// What there is to do for one save.
  struct Work {
    std::shared_ptr<SaveState> save;
    std::deque<uint32_t> leased;    // first: they hold memory
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
  /// Sorts new entries into `works_`; waits for one if there is no work. False: the end.
  bool TakeEntries();
  /// Does what can be done for a save without waiting. True: something was.
  absl::StatusOr<bool> Step(Work* work);
  /// Nothing can be done without waiting: waits a moment, for what is likely to end first.
  void Rest();
  absl::Status RestWith(Work* work);
  absl::Status StartCopies(Work* work, uint32_t index);
  absl::StatusOr<bool> FinishOldest(Work* work, absl::Duration timeout);
  void Fail(Work* work, const absl::Status& status);
  /// For a save that has failed: drops what has not begun. What a device has begun to copy stays in
  /// use until it has ended, whatever it ended with. True: something has.
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
