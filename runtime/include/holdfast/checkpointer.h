// The front door: tensors in, a durable, verified checkpoint out.
#ifndef HOLDFAST_CHECKPOINTER_H_
#define HOLDFAST_CHECKPOINTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "holdfast/save.h"
#include "holdfast/staging.h"

namespace holdfast {

/// What to do with a save that arrives while earlier ones hold the staging memory.
enum class WhenFull { kWait, kSkip, kFail };

/// What a worker does when the trainer dies after everything was sealed. (If not, it always removes
/// its partial files.)
enum class TrainerDeath { kFinish, kStop };

/// Which checkpoints of a series stay. A series is the checkpoints whose names differ in their last
/// run of digits alone: "step-80" and "step-100". "best" is a series of its own, and no other save
/// removes it. Deleting happens in the background, after the successor is durable.
struct Retention {
  uint32_t keep_last = 0;   ///< Keep the newest N by the time of their saves; 0 keeps all.
  uint64_t keep_every = 0;  ///< Besides, keep every step that is a multiple of this; 0 is none.
};

/// How a Checkpointer works. The defaults suit one rank on a local disk.
struct CheckpointerOptions {
  /// Checkpoints are made below it. It must exist; the first save finds out whether it can be
  /// written to.
  std::string directory;
  StagingOptions staging;
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;
  uint32_t queue_depth = 8;  ///< Chunks in flight in the worker.
  uint32_t pwrite_threads = 2;
  bool direct_io = true;
  bool read_back = false;    ///< Compare what is really on disk before committing.
  bool second_look = false;  ///< Compare host sources again after copying: finds torn copies.
  /// Digest host tensors while they are copied, a cache's worth at a time: their bytes cross the
  /// memory bus once less. What stands behind a checksum that is not known by then (torch's zip
  /// framing, a tensor over several chunks) is digested afterwards.
  bool fused_copy = true;
  TrainerDeath trainer_death = TrainerDeath::kFinish;
  WhenFull when_full = WhenFull::kWait;
  Qos qos;
  Retention retention;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  absl::Duration time_memory_max =
      absl::Minutes(10);  ///< SaveAsync waits this long for staging memory.
  absl::Duration time_stalled_max =
      absl::Minutes(10);  ///< A worker without any progress for this long has failed.
  /// A rank that lives is waited for this long by the others, which are done.
  absl::Duration time_ranks_max = absl::Minutes(30);
  /// A rank without a sign of life for this long has failed: nothing of it runs any more, or it
  /// has not begun the save while others wait for it. The same on all ranks.
  absl::Duration time_liveness_max = absl::Seconds(30);
  /// For proving that faults are found, never for production: called with each extent right after
  /// its digests were taken and before the worker is told, from a sealing thread.
  std::function<void(const SealedExtent&)> on_sealed;
  std::string worker_program;  ///< Path of holdfast-worker; empty: $HOLDFAST_WORKER, then beside
                               ///< the library.
};

/// What Create refuses whatever the machine and the directory are like. It makes and opens nothing.
/// \error kInvalidArgument naming the option, its value and what is allowed.
absl::Status ValidateOptions(const CheckpointerOptions& options);

/// One save.
struct SaveRequest {
  std::string name;  ///< Of the checkpoint's directory, one path component, e.g. "step-1200".
  uint64_t step = 0;
  absl::Span<const TensorSource> tensors;  ///< Written as one safetensors file of this rank ...
  const SavePlan* plan = nullptr;          ///< ... or a plan of the caller's own, if not null.
  /// Exchange an existing checkpoint of that name instead of refusing. It must hold nothing else
  /// (kFailedPrecondition names the entry). Of two saves of one name the one that began later
  /// stays; the other ends with kAborted.
  bool replace = false;
  AttemptId attempt;  ///< Agreed by all ranks; none: random (world size 1 only).
  /// The checkpoint that the state descends from, for the commit record. None: the last one that
  /// was committed through this Checkpointer, else the newest of the directory when it was created.
  AttemptId parent;
  /// A framework owns the directory: files are committed one by one into `directory`/`name`, which
  /// exists, and nothing is renamed; the framework's own last file commits.
  bool files_only = false;
};

/// Saves checkpoints asynchronously.
///
/// A save of the tensors of the save before (names, dtypes, shapes, order) is planned from what
/// that one has kept: about 200 bytes a tensor between saves, 256 MiB at most.
///
/// Several saves may be in flight; they share the staging memory first come first served. Bytes
/// that a save uses are reused only after its worker is provably gone (or, for saves larger than
/// the arena, has acknowledged them).
///
/// \threadsafety All methods may be called from any thread.
/// \forksafety In a child of the creating process every call returns FAILED_PRECONDITION, the
/// destructor does nothing.
class Checkpointer {
 public:
  /// Takes the staging memory and starts the supervisor.
  /// \error kInvalidArgument, kNotFound (directory), kResourceExhausted (memory), ... naming the
  /// option to change.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Create(const CheckpointerOptions& options);

  /// A second front door to the same staging memory and workers, for another directory: its saves
  /// wait in the same queue and count against the same cap. What is shared is this one's, whatever
  /// `options` say: staging, launcher, worker_program, fused_copy, second_look, on_sealed,
  /// time_memory_max and time_stalled_max. Either may be destroyed first.
  absl::StatusOr<std::unique_ptr<Checkpointer>> CreateBeside(
      const CheckpointerOptions& options) const;

  /// Waits for saves in flight (bounded by their own deadlines), then gives everything back.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Starts a save. Host tensors are captured when it returns; tensors on a device when the handle
  /// says *staged*. Errors that are known by then are returned here: kAlreadyExists,
  /// kInvalidArgument, kUnavailable (skipped because the memory is held, WhenFull::kSkip),
  /// kResourceExhausted (WhenFull::kFail), kDeadlineExceeded, ...
  absl::StatusOr<SaveHandle> SaveAsync(const SaveRequest& request);

  /// Waits until no save and no background deletion is in flight. Returns the first error of any
  /// save since the last Flush that no WaitDurable has returned.
  absl::Status Flush(absl::Duration timeout);

  /// Gives the arena's pages back to the system; the next save takes them again.
  /// \error kFailedPrecondition while a save is in flight.
  absl::Status Trim();

  /// Makes `device`'s copies into the arena fast (registers it) ahead of the first save; also done
  /// on demand.
  absl::Status RegisterDevice(Device* device);

  StagingStats staging() const;

  const CheckpointerOptions& options() const;

  class Core;
  class Impl;

 private:
  explicit Checkpointer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A random attempt id.
AttemptId NewAttemptId();

}  // namespace holdfast

#endif  // HOLDFAST_CHECKPOINTER_H_
