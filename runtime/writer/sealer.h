// Digesting what was staged, on a small pool of threads, while later tensors are still being
// copied.
#ifndef HOLDFAST_RUNTIME_WRITER_SEALER_H_
#define HOLDFAST_RUNTIME_WRITER_SEALER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/pod.h"
#include "holdfast/staging.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/save_state.h"

namespace holdfast::writer {

/// Seals extents: digests (whole and by piece) into the job table, then the lease's state, then
/// publication to the worker, in that order. The last extent of a save is published behind its
/// manifest.
class Sealer {
 public:
  Sealer(staging::StagingPool* pool, uint32_t threads,
         std::function<void(const SealedExtent&)> on_sealed);
  ~Sealer();  // finishes what was queued

  /// Starts the threads, as many as there can be. \error Not even one.
  absl::Status Start();

  /// Queues extent `index`, whose bytes are all in the arena. The save gains a user until it is
  /// sealed.
  void Enqueue(std::shared_ptr<SaveState> save, uint32_t index);

  /// Has extent `index` copied and sealed by a thread of the pool, ahead of all seals, if one of
  /// them has no copy to make. False: none has, and `copy` is not called. `copy` brings the bytes
  /// into the arena; false from it: there is nothing to seal.
  bool TryCopy(std::shared_ptr<SaveState> save, uint32_t index, std::function<bool()> copy);

  /// Seals an extent whose digests were taken while it was copied: `whole`, and those of its
  /// pieces, already in the table.
  void SealDigested(const std::shared_ptr<SaveState>& save, uint32_t index, const Digest& whole);

 private:
  struct Task {
    std::shared_ptr<SaveState> save;
    uint32_t index = 0;
    std::function<bool()> copy;  // null: the bytes are there
    bool sealed = false;         // the save's last extent, to be published
  };
  void Run();
  Task Next();
  /// False: a checksum that the extent has a place for is not known yet; it is queued again then.
  bool TakeChecksums(const Task& task);
  void Do(const Task& task);
  void Seal(const std::shared_ptr<SaveState>& save, uint32_t index);
  void Publish(const std::shared_ptr<SaveState>& save, uint32_t index);
  void PublishLast(SaveState* save, uint32_t index);

  staging::StagingPool* pool_;
  std::function<void(const SealedExtent&)> on_sealed_;
  base::Mutex mutex_;
  base::Condition changed_;
  std::deque<Task> copies_ ABSL_GUARDED_BY(mutex_);
  uint32_t copies_under_way_ ABSL_GUARDED_BY(mutex_) = 0;  // those and what threads are copying
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t threads_max_;
  std::vector<std::unique_ptr<base::Thread>> threads_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_SEALER_H_
