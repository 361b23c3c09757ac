// Many saves under an allocator that refills every released byte at once; each checkpoint is read
// from disk and compared with the state at its call.
#ifndef HOLDFAST_TESTS_STRESS_HOSTILE_SAVES_H_
#define HOLDFAST_TESTS_STRESS_HOSTILE_SAVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "holdfast/pod.h"

namespace holdfast::testing {

struct HostileOptions {
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;
  PageRung pages = PageRung::kAuto;
  uint32_t saves = 10;
  bool read_back = false;
  /// Saves larger than the arena, so that extents are reused during the save.
  bool streamed = false;
  /// Return the pages between saves.
  bool trim_between = false;
};

struct HostileResult {
  uint64_t saves = 0;
  uint64_t refills = 0;              ///< Released runs, each overwritten at once.
  PageRung pages = PageRung::kAuto;  ///< Page kind of the arena.
  /// Refused saves, and checkpoints whose bytes on disk differ from the state's.
  std::vector<std::string> problems;
};

HostileResult RunHostileSaves(const HostileOptions& options);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_STRESS_HOSTILE_SAVES_H_
