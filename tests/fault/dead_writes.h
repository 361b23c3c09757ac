// Workers killed with writes in flight, and a next save that needs their memory at once.
#ifndef HOLDFAST_TESTS_FAULT_DEAD_WRITES_H_
#define HOLDFAST_TESTS_FAULT_DEAD_WRITES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "holdfast/pod.h"

namespace holdfast::testing {

struct DeadWritesOptions {
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kUring;
  uint32_t kills = 1;
};

struct DeadWritesResult {
  std::string skipped;         ///< Reason for a skip; empty otherwise.
  uint64_t pages_written = 0;  ///< Pages of the killed workers, as found in their files.
  uint64_t pages_dirty = 0;    ///< Pages among these with bytes of another save.
  std::vector<std::string> problems;
};

/// On a disk with a limited rate: kills a save's worker with writes in flight, starts the next
/// save, which needs the same memory, at once, and reads the dead worker's file through a
/// descriptor opened before the kill.
DeadWritesResult KillWorkersInWrites(const DeadWritesOptions& options);

struct DeadTrainerResult {
  std::string skipped;         ///< Reason for a skip; empty otherwise.
  uint64_t pages_at_lock = 0;  ///< Pages of the dead worker's file when the lock is free.
  uint64_t pages_landed = 0;   ///< The same when no write is in flight.
  std::vector<std::string> problems;
};

/// On a disk with a limited rate: kills a trainer and its worker with writes in flight, waits for
/// the save's lock, and reads the dead worker's file through a descriptor opened before the kill.
/// Then a recovery removes the save.
DeadTrainerResult LockDuringWrites(Launcher launcher, EngineRung engine);

struct ClosedResult {
  std::string skipped;             ///< Reason for a skip; empty otherwise.
  uint64_t pages_at_close = 0;     ///< Pages of the dead worker's file when the owner is closed.
  uint64_t pages_at_release = 0;   ///< The same when its memory is unmapped.
  uint64_t pages_landed = 0;       ///< The same when no write is in flight.
  std::vector<std::string> stays;  ///< Resources of the process beyond its former ones.
  std::vector<std::string> problems;
};

/// On a disk with a limited rate: kills a save's worker with writes in flight, closes the
/// Checkpointer at once, and waits up to `patience` until the process holds no more than before.
ClosedResult CloseInWrites(Launcher launcher, EngineRung engine, absl::Duration patience);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_FAULT_DEAD_WRITES_H_
