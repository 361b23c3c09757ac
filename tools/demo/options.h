// The command line of holdfast-demo.
#ifndef HOLDFAST_TOOLS_DEMO_OPTIONS_H_
#define HOLDFAST_TOOLS_DEMO_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "holdfast/pod.h"

namespace holdfast::demo {

/// What is done to the staging memory on purpose.
enum class Mischief {
  kNone,
  kMutateSealed,      ///< Sealed bytes are overwritten before they are written.
  kMutateAndRestore,  ///< And put back once the disk has them, before the worker looks again.
};

struct Options {
  std::string file;        ///< A safetensors file to train on; empty: a GPT-2-sized state.
  std::string directory;   ///< Empty: a temporary one, removed at the end.
  bool temporary = false;  ///< `directory` was made by this program.
  uint32_t saves = 3;
  uint32_t steps_between = 3;
  uint32_t threads = 0;      ///< Of the training step; 0: one per CPU, at most 8.
  uint64_t arena_bytes = 0;  ///< 0: as much as the state needs.
  uint64_t seed = 1;
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;
  uint32_t keep_last = 0;
  bool read_back = false;
  bool replace = false;
  bool json = false;
  Mischief mischief = Mischief::kNone;
};

/// Exit statuses, as --help lists them.
inline constexpr int kExitSound = 0;
inline constexpr int kExitFaultFound = 1;
inline constexpr int kExitFaultMissed = 2;
inline constexpr int kExitFailed = 3;
inline constexpr int kExitUsage = 64;

/// Reads the command line. Nothing when the program is to end, with `*exit_status`: help was
/// printed, or what is wrong with the command line.
std::optional<Options> ParseOptions(int argc, char** argv, int* exit_status);

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_OPTIONS_H_
