// The command line of holdfast-bench.
#ifndef HOLDFAST_TOOLS_BENCH_OPTIONS_H_
#define HOLDFAST_TOOLS_BENCH_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/pod.h"

namespace holdfast::bench {

struct Options {
  std::string directory = ".";
  uint64_t bytes = uint64_t{4} << 30;  ///< Of the state that is written, verified and loaded.
  uint32_t pairs = 9;                  ///< Samples per figure, taken in turn.
  uint32_t calls = 200;                ///< Save calls per launcher and trainer size for the stall.
  uint64_t ballast_bytes = uint64_t{8} << 30;  ///< The large trainer of the growth figures.
  uint32_t settle_ms = 300;                    ///< After deleting, before the next sample.
  Launcher launcher = Launcher::kSpawn;
  bool json = false;
  bool quick = false;
  std::vector<std::string> only;  ///< Sections; empty: all.
};

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 3;
inline constexpr int kExitUsage = 64;

/// The ballast of the small trainer.
inline constexpr uint64_t kBallastSmallBytes = uint64_t{100} << 20;

/// Reads the command line. Nothing when the program is to end, with `*exit_status`.
std::optional<Options> ParseOptions(int argc, char** argv, int* exit_status);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_OPTIONS_H_
