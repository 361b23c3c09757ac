// Saves in flight of other processes, for a display beside the training.
#ifndef HOLDFAST_WATCH_H_
#define HOLDFAST_WATCH_H_

#include <cstdint>
#include <string>
#include <vector>

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
  /// The phase is "quarantined" once the save has ended and its staging memory is held until its
  /// last transfer has landed.
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

/// Reads the ranks whose part of a save of several ranks is not durable yet, in order: the save
/// waits for them. Rank 0, which commits, is returned where every other part is durable. `fd` is
/// the save's rank board: `ranks.board` in the directory `partial`, which trainer and worker hold
/// open. \error kFailedPrecondition: the file is no board of the attempt and world size.
absl::StatusOr<std::vector<uint32_t>> ReadRanksWaitedFor(int fd, const AttemptId& attempt,
                                                         uint32_t world_size);

}  // namespace holdfast

#endif  // HOLDFAST_WATCH_H_
