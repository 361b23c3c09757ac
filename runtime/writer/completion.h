// A worker's result, copied out of the shared table once and checked.
//
// A damaged worker may write any bytes to the table, at any time. The trainer decides by a copy,
// and checks each value of the copy before its use as an index, a name or an enumerator.
#ifndef HOLDFAST_RUNTIME_WRITER_COMPLETION_H_
#define HOLDFAST_RUNTIME_WRITER_COMPLETION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::writer {

/// Bounds of a job's result: the trainer's own numbers, never the table's.
struct CompletionLimits {
  uint32_t file_count = 0;
  uint32_t tensor_count = 0;
  uint32_t world_size = 1;
  uint64_t bytes = 0;  ///< Of all files.
};

/// The fields of the same names in layout::CompletionSlot.
struct Completion {
  Failure failure;
  WorkerFigures figures;
  bool left_files = false;
  layout::JobTimes times;
  std::string reason;
  layout::RankFailure rank_failure;
  std::string left_behind;
  std::string foreign;
  AttemptId newer;
  uint64_t newer_step = 0;
};

/// Returns the result of a job, or nothing before the job's end.
/// \error kInternal, with a clause behind "its worker": no sound worker writes such a value.
absl::StatusOr<std::optional<Completion>> ReadCompletion(const layout::Job& job,
                                                         const CompletionLimits& limits);

/// Returns a clause behind "its worker" when a state of the running job has no valid value; null
/// otherwise. A state has a few values, so random damage rarely passes.
const char* WrongState(const layout::Job& job);

/// Returns the worker's text for messages: printable ASCII, '?' for other bytes.
std::string ReadReason(const layout::CompletionSlot& slot);

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_COMPLETION_H_
