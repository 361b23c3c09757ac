// Saves tensors as durable, verified checkpoints in the background.
#ifndef HOLDFAST_CHECKPOINTER_H_
#define HOLDFAST_CHECKPOINTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "holdfast/save.h"
#include "holdfast/staging.h"

namespace holdfast {

/// Action for a save that finds the staging memory held by earlier saves.
enum class WhenFull { kWait, kSkip, kFail };

/// Action of a worker whose trainer dies after the last extent was sealed. A worker whose trainer
/// dies earlier always removes its partial files.
enum class TrainerDeath { kFinish, kStop };

/// Selects the checkpoints of a series that stay. The names of a series differ in their last run of
/// digits alone: "step-80" and "step-100". "best" is a series by itself, and saves of other series
/// never remove it. Deletion runs in the background, after the successor is durable.
struct Retention {
  uint32_t keep_last = 0;   ///< Keep the newest N by the time of their saves; 0 keeps all.
  uint64_t keep_every = 0;  ///< Also keep steps that are multiples of this number; 0: none.
};

/// Options of a Checkpointer. The defaults suit one rank on a local disk.
struct CheckpointerOptions {
  /// Parent directory of the checkpoints. The directory must exist; the first save finds out
  /// whether the directory is writable.
  std::string directory;
  StagingOptions staging;
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;
  uint32_t queue_depth = 8;  ///< Chunks in flight in the worker.
  uint32_t pwrite_threads = 2;
  bool direct_io = true;
  bool read_back = false;    ///< Read the files back from disk before committing.
  bool second_look = false;  ///< Compare host sources again after copying; finds torn copies.
  /// Digest host tensors while copying, one cache-sized block at a time: the bytes cross the memory
  /// bus once less. Bytes behind an unknown checksum (torch's zip framing, a tensor over several
  /// chunks) are digested after the copy.
  bool fused_copy = true;
  TrainerDeath trainer_death = TrainerDeath::kFinish;
  WhenFull when_full = WhenFull::kWait;
  Qos qos;
  Retention retention;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  /// Longest wait of SaveAsync for staging memory.
  absl::Duration time_memory_max = absl::Minutes(10);
  /// A worker without progress for this long has failed.
  absl::Duration time_stalled_max = absl::Minutes(10);
  /// Longest wait of finished ranks for a live rank.
  absl::Duration time_ranks_max = absl::Minutes(30);
  /// A rank without a sign of life for this long has failed: its processes are gone, or its save
  /// has not begun while other ranks wait. Must be equal on all ranks.
  absl::Duration time_liveness_max = absl::Seconds(30);
  /// For fault injection in tests only. Called by a sealing thread with each extent, after the
  /// digests are taken and before the worker is notified.
  std::function<void(const SealedExtent&)> on_sealed;
  /// Path of holdfast-worker. Empty: $HOLDFAST_WORKER, the executable's directory,
  /// ../libexec/holdfast beside it, then the installation.
  std::string worker_program;
};

/// Checks `options` without touching the machine or the directory. Create refuses the same options.
/// \error kInvalidArgument naming the option, its value and the allowed range.
absl::Status ValidateOptions(const CheckpointerOptions& options);

/// One save.
struct SaveRequest {
  std::string name;  ///< Directory name of the checkpoint, one path component, e.g. "step-1200".
  uint64_t step = 0;
  absl::Span<const TensorSource> tensors;  ///< Written as one safetensors file, if `plan` is null.
  const SavePlan* plan = nullptr;          ///< A plan made by the caller, in place of `tensors`.
  /// Replace an existing checkpoint of that name. Its directory must hold no foreign entry
  /// (kFailedPrecondition names the entry). Without `replace` an existing name is refused. Of two
  /// saves of one name the later one stays; the earlier one ends with kAborted.
  bool replace = false;
  AttemptId attempt;  ///< Equal on all ranks; zero: random (world size 1 only).
  /// Attempt id of the parent checkpoint, for the commit record. Zero: the last save through this
  /// Checkpointer that has not failed, else the newest of its series in the directory at Create.
  /// After a load of an older checkpoint pass its id: retention then removes the abandoned branch
  /// first.
  AttemptId parent;
  /// The save counts as younger than this, in nanoseconds since 1970, also where the clock stands
  /// behind: the time of the latest checkpoint that the caller knows of in another place.
  uint64_t saved_after_ns = 0;
  /// For a directory that a framework owns: files are committed one by one into the existing
  /// `directory`/`name`, and no directory is renamed. The framework's last file commits.
  bool files_only = false;
  /// Save a file in place of a directory: `plan` has a single file, called `name`; world size 1.
  /// The directory may hold foreign files. The manifest, ".NAME.holdfast-<attempt>.json", becomes
  /// durable first; then a rename commits the file. With `replace` an older file stays whole until
  /// the rename. Of two saves of a file the later stays.
  bool single_file = false;
  /// The save becomes durable only after SaveHandle::Confirm. For copies that run while the trainer
  /// goes on: the caller checks afterwards that no source has changed meanwhile. A save that is not
  /// confirmed fails by `time_stalled_max`, and when the trainer dies.
  bool confirm = false;
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
/// \forksafety In a child of the creating process every call returns kFailedPrecondition, and the
/// destructor does nothing.
class Checkpointer {
 public:
  /// Takes the staging memory and starts the supervisor.
  /// \error kInvalidArgument, kNotFound (directory), kResourceExhausted (memory), ... naming the
  /// option to change.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Create(const CheckpointerOptions& options);

  /// Takes staging memory and starts the supervisor for those that CreateBeside makes, and for no
  /// directory: SaveAsync returns kFailedPrecondition. `options.directory` is not looked at.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> CreateMemory(
      const CheckpointerOptions& options);

  /// Makes a Checkpointer for another directory that shares this one's staging memory and workers:
  /// saves wait in one queue and count against one cap. Shared settings are taken from this
  /// Checkpointer, not from `options`: staging, launcher, worker_program, fused_copy, second_look,
  /// on_sealed, time_memory_max and time_stalled_max. Either object may be destroyed first.
  absl::StatusOr<std::unique_ptr<Checkpointer>> CreateBeside(
      const CheckpointerOptions& options) const;

  /// Waits for saves in flight (bounded by their own deadlines), then releases the staging memory.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Starts a save. Host tensors are captured when the call returns; device tensors when the handle
  /// reports *staged*. Errors of the start are returned here, errors of the save by the handle.
  /// \error kAlreadyExists, kInvalidArgument, kUnavailable (skipped because the memory is held,
  /// WhenFull::kSkip), kResourceExhausted (WhenFull::kFail), kDeadlineExceeded, ...
  absl::StatusOr<SaveHandle> SaveAsync(const SaveRequest& request);

  /// Waits until no save and no background deletion is in flight. Returns the first error since the
  /// last Flush that no WaitDurable has returned.
  absl::Status Flush(absl::Duration timeout);

  /// Returns the arena's pages to the system; the next save takes new pages.
  /// \error kFailedPrecondition while a save is in flight.
  absl::Status Trim();

  /// Registers the arena with `device` ahead of the first save, for fast copies. Without this call
  /// the first save from `device` registers the arena.
  /// \error The device's. Saves from `device` work all the same, with slower copies.
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
