// A handle to a save: wait, progress, cancel.
#ifndef HOLDFAST_SAVE_H_
#define HOLDFAST_SAVE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/device.h"
#include "holdfast/pod.h"

namespace holdfast {

/// Progress of a save. Bytes count the files' bytes, not padding.
struct SaveProgress {
  std::string
      phase;  ///< "staging", "writing", "syncing", "manifest", "waiting for ranks", "done", ...
  uint64_t bytes_total = 0;
  uint64_t bytes_sealed = 0;
  uint64_t bytes_written = 0;  ///< Counted from completions.
};

/// Result of a save. Times are in seconds of the caller's clock.
struct SaveReport : WorkerFigures {
  std::string path;  ///< The checkpoint's final path.
  uint64_t epoch = 0;
  uint64_t step = 0;
  AttemptId attempt;
  uint64_t bytes = 0;  ///< All files of this rank without the manifest.
  uint32_t files = 0;
  uint32_t tensors = 0;
  Launcher launcher = Launcher::kSpawn;
  std::string engine_reason;
  PageRung pages = PageRung::kAuto;
  /// Why a device copies into unregistered memory, which is slow and blocks the device's thread;
  /// empty: it does not.
  std::string unregistered;
  /// The save exceeded the free arena, so that parts were released before its end.
  bool streamed = false;
  double time_in_call = 0;  ///< The caller's stall: SaveAsync from entry to return.
  double time_copying = 0;  ///< Part of time_in_call: copying host tensors (fused: digesting).
  double time_waiting_memory = 0;  ///< Part of time_in_call: waiting for staging memory.
  /// Part of time_in_call: starting the worker, or handing over the job.
  double time_launching = 0;
  double time_to_staged = 0;   ///< From entry until the last extent was sealed.
  double time_to_durable = 0;  ///< From entry until the worker reported durable.
  double time_writing = 0;     ///< In the worker: first submit to last completion and digest.
  double time_syncing = 0;     ///< In the worker: every fsync, and the renames.
  double cpu_sealing = 0;      ///< CPU seconds of the digesting threads for this save.
  double cpu_worker = 0;       ///< CPU seconds of the worker for this save.

  /// The entry on CLOCK_MONOTONIC, in nanoseconds: one axis for several saves and processes.
  uint64_t entered_ns = 0;
  /// Points in the worker on the same clock, in seconds from the entry. 0: not reached, or no step
  /// of this save.
  double at_worker_started = 0;
  double at_first_submit = 0;
  double at_last_complete = 0;    ///< End of the last data write and its digest.
  double at_data_synced = 0;      ///< fsync of the data has returned.
  double at_manifest_synced = 0;  ///< The manifest has its name and is durable.
  double at_committed = 0;        ///< The directory has its final name and is durable.
};

/// Calls `visit(name, value)` for every field of `report`. Python's reports and JSON documents are
/// made from this table: a new field here appears in both.
template <typename Visit>
void ForEachField(const SaveReport& report, Visit&& visit) {
  visit("path", report.path);
  visit("epoch", report.epoch);
  visit("step", report.step);
  visit("attempt", report.attempt);
  visit("bytes", report.bytes);
  visit("bytes_written", report.bytes_written);
  visit("files", report.files);
  visit("tensors", report.tensors);
  visit("launcher", report.launcher);
  visit("engine", report.engine);
  visit("engine_reason", report.engine_reason);
  visit("pages", report.pages);
  visit("direct_io", report.direct_io);
  visit("unregistered", report.unregistered);
  visit("streamed", report.streamed);
  visit("space_reserved", report.space_reserved);
  visit("write_attempts", report.write_attempts);
  visit("time_in_call", report.time_in_call);
  visit("time_copying", report.time_copying);
  visit("time_waiting_memory", report.time_waiting_memory);
  visit("time_launching", report.time_launching);
  visit("time_to_staged", report.time_to_staged);
  visit("time_to_durable", report.time_to_durable);
  visit("time_writing", report.time_writing);
  visit("time_syncing", report.time_syncing);
  visit("entered_ns", report.entered_ns);
  visit("at_worker_started", report.at_worker_started);
  visit("at_first_submit", report.at_first_submit);
  visit("at_last_complete", report.at_last_complete);
  visit("at_data_synced", report.at_data_synced);
  visit("at_manifest_synced", report.at_manifest_synced);
  visit("at_committed", report.at_committed);
  visit("cpu_sealing", report.cpu_sealing);
  visit("cpu_worker", report.cpu_worker);
  visit("worker_private_bytes_peak", report.worker_private_bytes_peak);
}

class SaveState;

/// A reference to one save; copies refer to the same save. The save continues without any handle.
///
/// \threadsafety All methods may be called from any thread.
/// \forksafety In a child of the creating process every method returns kFailedPrecondition and does
/// nothing.
class SaveHandle {
 public:
  SaveHandle() = default;
  explicit SaveHandle(std::shared_ptr<SaveState> state) : state_(std::move(state)) {}

  /// Blocks until every tensor is copied: the caller may then change the tensors. Host tensors are
  /// already staged when SaveAsync returns.
  /// \error kDeadlineExceeded: the save goes on.
  absl::Status WaitStaged(absl::Duration timeout) const;

  /// Makes a stream of `device` (not the CPU) wait until this save's copies from that device have
  /// ended.
  absl::Status WaitStagedOn(Device* device, StreamHandle stream) const;

  /// Ends the wait of a save with SaveRequest::confirm, once; call it after WaitStaged. An error
  /// becomes the save's result, and nothing is committed. No effect on a save that has ended.
  absl::Status Confirm(const absl::Status& capture) const;

  /// Blocks until the checkpoint is durable (survives power loss) and its worker is joined.
  /// \error kDeadlineExceeded: the save goes on. Any other error is the save's final result:
  /// kDataLoss when a digest differs (with tensor, file and range), kResourceExhausted for a full
  /// disk, kAborted for a killed worker, ...
  absl::StatusOr<SaveReport> WaitDurable(absl::Duration timeout) const;

  /// True once WaitDurable would not block.
  bool IsDone() const;

  /// Stops the save and removes its partial files; WaitDurable then returns kCancelled. A save that
  /// is already committing completes.
  absl::Status Cancel() const;

  SaveProgress progress() const;
  uint64_t epoch() const;

  /// Returns the worker's process id, for diagnosis; this process's id for Launcher::kThread. 0
  /// before the worker has begun and after the save has ended.
  int worker_pid() const;

 private:
  std::shared_ptr<SaveState> state_;
};

}  // namespace holdfast

#endif  // HOLDFAST_SAVE_H_
