// The shared state of front doors to one staging arena.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_CORE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_CORE_H_

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "holdfast/checkpointer.h"
#include "runtime/base/mutex.h"
#include "runtime/checkpointer/device_registrant.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/save_state.h"
#include "runtime/writer/sealer.h"
#include "runtime/writer/stager.h"
#include "runtime/writer/supervisor.h"
#include "runtime/writer/worker_source.h"

namespace holdfast {

/// The memory, the workers and the threads of one staging arena.
class Checkpointer::Core {
 public:
  ~Core();

  /// Completes `given` with detected values (worker program, threads).
  absl::Status Start(CheckpointerOptions* given);
  /// Registers the arena with `device`, once. \error The device's: copies are then slower.
  absl::Status Register(Device* device);
  /// What holds the staging memory, for messages.
  std::string Holders() const;
  /// Opens the save's epoch and hands its job to a worker, in one step. Otherwise a kept worker
  /// could get a younger save's job before an older save's. The worker would then wait for memory
  /// reserved for the older save.
  absl::Status Launch(const std::string& title, int directory, SaveState* save)
      ABSL_LOCKS_EXCLUDED(launch_mutex_);

  std::unique_ptr<staging::StagingPool> pool;
  std::unique_ptr<writer::WorkerSource> workers;
  std::unique_ptr<writer::Sealer> sealer;
  std::unique_ptr<writer::Supervisor> supervisor;
  std::unique_ptr<writer::Stager> stager;

 private:
  base::Mutex launch_mutex_;
  base::Mutex mutex_;
  std::map<Device*, std::unique_ptr<checkpointer::DeviceRegistrant>> devices_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_CORE_H_
