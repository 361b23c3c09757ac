// The sections of the bench. Each measures one question and puts its figures in the document.
#ifndef HOLDFAST_TOOLS_BENCH_SECTIONS_H_
#define HOLDFAST_TOOLS_BENCH_SECTIONS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/bench/figures.h"
#include "tools/bench/options.h"
#include "tools/bench/scratch.h"

namespace holdfast::bench {

/// What a section gets.
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
/// A save eight times its staging memory: the cap, and the worker's own memory.
absl::Status RunMemory(const Bench& bench);

struct Section {
  const char* name;
  absl::Status (*run)(const Bench& bench);
};
const std::vector<Section>& Sections();
std::vector<std::string> SectionNames();

/// On a terminal, one line that says what is being measured; elsewhere nothing.
void ShowStep(const std::string& text);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_SECTIONS_H_
