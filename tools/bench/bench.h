// What every section of the bench gets, and the sections.
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
/// What a save call costs beside the copies, and whether that grows with the trainer.
absl::Status RunHandoff(const Bench& bench);
/// What a save call costs per tensor beside the copies.
absl::Status RunCall(const Bench& bench);
/// A save eight times its staging memory: the cap, and the worker's own memory.
absl::Status RunMemory(const Bench& bench);

/// On a terminal, one line that says what is being measured; elsewhere nothing.
void ShowStep(const std::string& text);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_BENCH_H_
