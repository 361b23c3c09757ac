// One save, with all that it cost.
#ifndef HOLDFAST_TOOLS_BENCH_ONE_SAVE_H_
#define HOLDFAST_TOOLS_BENCH_ONE_SAVE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/checkpointer.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {

inline constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

struct SaveCost {
  SaveReport report;
  double call_seconds = 0;  ///< Inside SaveAsync, by the caller's clock.
  double worker_cpu = 0;    ///< CPU seconds of the writing side.
  double total_cpu = 0;     ///< Of copying, sealing, supervising and writing together.

  double gib() const { return static_cast<double>(report.bytes) / kGib; }
  /// From the first submit until the checkpoint is durable.
  double write_seconds() const { return report.time_writing + report.time_syncing; }
};

/// Options of a checkpointer in the scratch directory, with an arena of `arena_bytes`.
CheckpointerOptions OptionsFor(const Bench& bench, uint64_t arena_bytes);

/// Saves `tensors` as `name` and waits until it is durable.
absl::StatusOr<SaveCost> MeasureSave(Checkpointer* checkpointer, const std::string& name,
                                     const std::vector<TensorSource>& tensors);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_ONE_SAVE_H_
