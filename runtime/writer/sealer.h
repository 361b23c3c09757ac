// Digests staged bytes on a small pool of threads, while later tensors are still being copied.
#ifndef HOLDFAST_RUNTIME_WRITER_SEALER_H_
#define HOLDFAST_RUNTIME_WRITER_SEALER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/pod.h"
#include "holdfast/staging.h"
#include "runtime/base/mutex.h"
#include "runtime/base/thread.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/save_state.h"

namespace holdfast::writer {

/// Seals extents: writes the digests (whole and by piece) into the job table, moves the lease's
/// state, and publishes to the worker, in this order. The last extent of a save is published behind
/// the manifest.
class Sealer {
 public:
  Sealer(staging::StagingPool* pool, uint32_t threads,
         std::function<void(const SealedExtent&)> on_sealed);
  ~Sealer();  // finishes the queued tasks

  /// Starts as many threads as possible. \error If no thread starts.
  absl::Status Start();

  /// Queues extent `index`, whose bytes are all in the arena. The save gains a user until the
  /// extent is sealed.
  void Enqueue(std::shared_ptr<SaveState> save, uint32_t index);

  /// Lets a thread of the pool copy and seal extent `index`, ahead of all seals. Returns false,
  /// without a call of `copy`, if every thread has a copy to make. `copy` brings the bytes into the
  /// arena; it returns false if there is nothing to seal.
  bool TryCopy(std::shared_ptr<SaveState> save, uint32_t index, std::function<bool()> copy);

  /// Seals an extent whose digests were computed during the copy: `whole`, and the pieces' digests
  /// in the table.
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
  /// Returns false if a checksum for a place of the extent is unknown; the extent is queued again
  /// later.
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
  uint32_t copies_under_way_ ABSL_GUARDED_BY(mutex_) = 0;  // queued and running copies
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t threads_max_;
  std::vector<std::unique_ptr<base::Thread>> threads_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_SEALER_H_
