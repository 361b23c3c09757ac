// Saves in flight of other processes, for a display beside the training.
#ifndef HOLDFAST_WATCH_H_
#define HOLDFAST_WATCH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "holdfast/save.h"

namespace holdfast {

/// A save in flight, as its job table shows it.
struct SaveInFlight {
  /// Final name: of the checkpoint's directory, or of a file that is saved by itself.
  std::string name;
  /// Name during the write; empty in a directory that a framework owns.
  std::string partial;
  AttemptId attempt;
  uint64_t step = 0;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;  ///< kAuto: the worker has not opened one yet.
  SaveProgress progress;
  /// Sealed bytes whose staging memory is not released yet.
  uint64_t bytes_held = 0;
  bool streams = false;  ///< The save releases staging memory before its end.
  /// In the worker's own pid namespace; the trainer's for Launcher::kThread. 0: not started yet.
  int worker_pid = 0;
};

/// Name of the memory file of a job table: the target of its link in /proc/PID/fd, behind
/// "/memfd:".
inline constexpr char kJobTableName[] = "holdfast-job";

/// Reads the job table of a save in flight. The trainer and its worker hold each table open, so
/// that opening an fd of theirs in /proc/PID/fd for reading gives `fd`. Copies the table and checks
/// the copy: a process that changes its table does no harm. Costs the watched processes nothing.
/// \error kNotFound: the job removes files and is no save. kUnavailable: the trainer is still
/// filling the table. kFailedPrecondition: the file is no job table, or that of another version.
absl::StatusOr<SaveInFlight> ReadSaveInFlight(int fd);

}  // namespace holdfast

#endif  // HOLDFAST_WATCH_H_
