// The parameters of every section of the bench, and the sections.
#ifndef HOLDFAST_TOOLS_BENCH_BENCH_H_
#define HOLDFAST_TOOLS_BENCH_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/pod.h"
#include "tools/bench/figures.h"

namespace holdfast::bench {

class Scratch;

struct Options {
  std::string directory = ".";
  uint64_t bytes = uint64_t{4} << 30;  ///< Of the written, verified and loaded state.
  uint32_t pairs = 9;                  ///< Samples per figure, taken in turn.
  uint32_t calls = 200;                ///< Save calls per launcher and trainer size for the stall.
  uint64_t ballast_bytes = uint64_t{8} << 30;  ///< The large trainer of the growth figures.
  uint32_t settle_ms = 300;                    ///< After deleting, before the next sample.
  Launcher launcher = Launcher::kSpawn;
  bool json = false;
  bool quick = false;
  std::vector<std::string> only;  ///< Sections; empty: all.
};

struct Bench {
  const Options& options;
  const Scratch& scratch;
  Figures& figures;
};

/// Writing, from first submit to durable, on every engine, against the disk's limit; CPU time.
absl::Status RunWrite(const Bench& bench);
/// Verifying and loading against the disk's read limit.
absl::Status RunRead(const Bench& bench);
/// Copying into the staging memory against memcpy.
absl::Status RunCopy(const Bench& bench);
/// Measures the cost of a save call beside the copies, and its growth with the trainer.
absl::Status RunHandoff(const Bench& bench);
/// Measures the cost of a save call per tensor beside the copies.
absl::Status RunCall(const Bench& bench);
/// Measures a save eight times its staging memory: the cap, and the worker's private memory.
absl::Status RunMemory(const Bench& bench);

/// Shows the present measurement in one line on a terminal; prints nothing elsewhere.
void ShowStep(const std::string& text);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_BENCH_H_
