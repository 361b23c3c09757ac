// One run of the demo: a training loop, saves of its state beside the loop, and the outcome.
#ifndef HOLDFAST_TOOLS_DEMO_SESSION_H_
#define HOLDFAST_TOOLS_DEMO_SESSION_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/save.h"
#include "holdfast/staging.h"
#include "holdfast/verify.h"

namespace holdfast::demo {

struct Options {
  std::string file;        ///< A safetensors file to train on; empty: a GPT-2-sized state.
  std::string directory;   ///< Where the checkpoints are.
  bool temporary = false;  ///< This program made `directory`.
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
  bool mutate_sealed = false;  ///< Sealed bytes of one save are overwritten before the write.
};

/// Exit statuses, as --help lists them.
inline constexpr int kExitSound = 0;
inline constexpr int kExitFaultFound = 1;
inline constexpr int kExitFaultMissed = 2;
inline constexpr int kExitFailed = 3;
inline constexpr int kExitUsage = 64;

struct SaveRow {
  std::string name;
  uint64_t step = 0;
  SaveHandle handle;
  bool attacked = false;
  bool ended = false;
  absl::Status status;    ///< Of the save.
  SaveReport report;      ///< Of a durable save.
  bool deleted = false;   ///< Deleted by retention.
  bool verified = false;  ///< `verify` is filled.
  VerifyReport verify;
  std::vector<uint64_t> fingerprints;  ///< Of the tensors when the save was asked for.
};

struct Outcome {
  std::vector<SaveRow> saves;
  StagingStats staging;
  uint64_t state_bytes = 0;
  uint64_t state_tensors = 0;
  std::string state_origin;
  double step_seconds = 0;  ///< Median of a training step.
  std::string deed;         ///< The deliberate damage.
  std::string loaded;       ///< The checkpoint that was loaded back; empty if absent.
  double load_seconds = 0;
  bool loaded_equal = false;
  std::vector<std::string> findings;  ///< Findings for people, one line each.
  int exit_status = kExitSound;
};

/// Trains and saves, then verifies the saves. With `mutate_sealed` one of the saves is attacked.
/// Prints a line at the end of each save.
Outcome RunSession(const Options& options);

/// Returns the stream of lines for people: standard output, unless the JSON document goes there.
inline std::FILE* Lines(const Options& options) { return options.json ? stderr : stdout; }

/// Returns the table of saves and the lines below, for people.
std::string Text(const Options& options, const Outcome& outcome);

/// The same for machines.
std::string Json(const Options& options, const Outcome& outcome);

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_SESSION_H_
