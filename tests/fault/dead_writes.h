// Workers that are killed with writes in flight, and a next save that wants their memory at once.
#ifndef HOLDFAST_TESTS_FAULT_DEAD_WRITES_H_
#define HOLDFAST_TESTS_FAULT_DEAD_WRITES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "holdfast/pod.h"

namespace holdfast::testing {

struct DeadWritesOptions {
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kUring;
  uint32_t kills = 1;
};

struct DeadWritesResult {
  std::string skipped;         ///< Why nothing was shown; empty otherwise.
  uint64_t pages_written = 0;  ///< By the killed workers, as found in their files.
  uint64_t pages_dirty = 0;    ///< Of those: not the bytes of the save that they belong to.
  std::vector<std::string> problems;
};

/// On a disk with a limit: a save's worker is killed while its writes are in flight; the next save,
/// which needs the same memory, begins at once; afterwards the dead worker's file is read through a
/// descriptor that was opened before the kill.
DeadWritesResult KillWorkersInWrites(const DeadWritesOptions& options);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_FAULT_DEAD_WRITES_H_
