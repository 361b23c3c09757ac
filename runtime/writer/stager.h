// Getting a save's bytes into the arena: host tensors by the caller's thread before its call
// returns, device tensors by a thread of the stager's, behind the caller.
#ifndef HOLDFAST_RUNTIME_WRITER_STAGER_H_
#define HOLDFAST_RUNTIME_WRITER_STAGER_H_

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/base/mutex.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/save_state.h"
#include "runtime/writer/sealer.h"

namespace holdfast::writer {

struct StagerOptions {
  bool fused_copy = false;
  bool second_look = false;
  absl::Duration time_memory_max = absl::Minutes(10);
};

class Stager {
 public:
  Stager(staging::StagingPool* pool, Sealer* sealer, const StagerOptions& options);
  ~Stager();  // after the last save was staged or failed

  /// Copies everything that lives in host memory and queues the rest. On an error the save's
  /// staging has failed (see SaveState::FailStaging) and the error is returned as well.
  absl::Status Stage(const std::shared_ptr<SaveState>& save);

 private:
  /// An extent whose device pieces are under way (or whose lease is still to be taken: `leased`
  /// false).
  struct DeviceExtent {
    uint32_t index = 0;
    bool leased = false;
    std::vector<std::pair<Device*, CopyTicket>> copies;
  };
  struct DeviceSave {
    std::shared_ptr<SaveState> save;
    std::deque<DeviceExtent> waiting;  // in order; those with host pieces are leased already
    std::deque<DeviceExtent> copying;
  };

  absl::Status StageHost(SaveState* save, const std::shared_ptr<SaveState>& shared,
                         std::vector<uint32_t>* device);
  absl::Status CopyHostPieces(SaveState* save, uint32_t index);
  absl::Status CopyFused(SaveState* save, uint32_t index);
  absl::Status LookAgain(const SaveState& save, uint32_t index) const;
  absl::StatusOr<staging::Lease> Acquire(SaveState* save, uint32_t index, absl::Time deadline);
  void TakeLease(SaveState* save, uint32_t index, const staging::Lease& lease);

  void RunDevice();
  absl::Status StageDevice(DeviceSave* work);
  absl::Status StartCopies(SaveState* save, DeviceExtent* extent);
  absl::StatusOr<bool> FinishOldest(DeviceSave* work, absl::Duration timeout);

  staging::StagingPool* pool_;
  Sealer* sealer_;
  StagerOptions options_;
  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<DeviceSave> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread device_thread_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_STAGER_H_
