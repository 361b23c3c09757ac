// What came of one run of the demo: a row per save, and how it all ended.
#ifndef HOLDFAST_TOOLS_DEMO_OUTCOME_H_
#define HOLDFAST_TOOLS_DEMO_OUTCOME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/save.h"
#include "holdfast/staging.h"
#include "holdfast/verify.h"
#include "tools/demo/options.h"

namespace holdfast::demo {

struct SaveRow {
  std::string name;
  uint64_t step = 0;
  SaveHandle handle;
  bool attacked = false;
  bool ended = false;
  absl::Status status;    ///< Of the save.
  SaveReport report;      ///< If it is durable.
  bool deleted = false;   ///< Retention took it.
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
  std::string deed;         ///< What was damaged on purpose.
  std::string loaded;       ///< The checkpoint that was loaded back; empty: none.
  double load_seconds = 0;
  bool loaded_equal = false;
  std::vector<std::string> findings;  ///< What a person should know, one line each.
  int exit_status = kExitSound;
};

/// The table of saves and what follows it, for people.
std::string Text(const Options& options, const Outcome& outcome);

/// The same for machines.
std::string Json(const Options& options, const Outcome& outcome);

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_OUTCOME_H_
