// A worker's result, copied out of the shared table once and checked.
//
// A damaged worker may have written anything to the table, and may go on writing. So the trainer
// decides by a copy, and uses no value of it as an index, a name or an enumerator before a check.
#ifndef HOLDFAST_RUNTIME_WRITER_COMPLETION_H_
#define HOLDFAST_RUNTIME_WRITER_COMPLETION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::writer {

/// What a job's result may refer to. The trainer's own numbers, never the table's.
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
/// \error kInternal, with a clause behind "its worker": a value that no sound worker writes.
absl::StatusOr<std::optional<Completion>> ReadCompletion(const layout::Job& job,
                                                         const CompletionLimits& limits);

/// Returns why the states that a worker changes during a job are not a worker's ("its worker
/// ..."), or null. Each state is one byte pattern of few, so damage rarely leaves all of them.
const char* WrongState(const layout::Job& job);

/// Returns the worker's text for a person, without bytes that are no text.
std::string ReadReason(const layout::CompletionSlot& slot);

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_COMPLETION_H_
