#include "tools/bench/one_save.h"

#include <algorithm>

#include "tools/bench/clock.h"
#include "tools/bench/memory.h"

namespace holdfast::bench {
namespace {}  // namespace

CheckpointerOptions OptionsFor(const Bench& bench, uint64_t arena_bytes) {
  CheckpointerOptions options;
  options.directory = bench.scratch.path();
  options.launcher = bench.options.launcher;
  options.staging.arena_bytes = arena_bytes;
  return options;
}

absl::StatusOr<SaveCost> MeasureSave(Checkpointer* checkpointer, const std::string& name,
                                     const std::vector<TensorSource>& tensors) {
  SaveRequest request;
  request.name = name;
  request.tensors = tensors;
  SaveCost cost;
  const Stopwatch watch;
  const absl::StatusOr<SaveHandle> handle = checkpointer->SaveAsync(request);
  cost.call_seconds = watch.seconds();
  if (!handle.ok()) return handle.status();
  absl::StatusOr<SaveReport> report = handle->WaitDurable(absl::InfiniteDuration());
  if (!report.ok()) return report.status();
  cost.report = *report;
  // A process of its own is reckoned by the kernel, its start and end included, where it was
  // waited for: a kept worker was not, and tells itself.
  const Launcher launcher = report->launcher;
  const bool ended = launcher == Launcher::kSpawn || launcher == Launcher::kFork;
  cost.worker_cpu =
      ended ? std::max(watch.children_cpu_seconds(), report->cpu_worker) : report->cpu_worker;
  cost.total_cpu = watch.cpu_seconds() + (launcher == Launcher::kThread ? 0.0 : cost.worker_cpu);
  return cost;
}

}  // namespace holdfast::bench
