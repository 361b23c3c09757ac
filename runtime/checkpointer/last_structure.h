// The plan of the last save's tensors, for the next save. A training loop saves the same tensors
// again and again.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_LAST_STRUCTURE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_LAST_STRUCTURE_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "runtime/base/mutex.h"
#include "runtime/format/safetensors.h"

namespace holdfast::checkpointer {

/// \threadsafety Any thread.
class LastStructure {
 public:
  /// A larger structure is not kept; the next save plans anew.
  static constexpr size_t kKeptBytesMax = size_t{256} << 20;

  /// Returns the kept structure if it describes `tensors`. Otherwise plans and keeps a new
  /// structure. \error As PlanSafetensors.
  absl::StatusOr<std::shared_ptr<const format::SafetensorsStructure>> Of(
      const std::string& file_name, absl::Span<const TensorSource> tensors)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  base::Mutex mutex_;
  std::shared_ptr<const format::SafetensorsStructure> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_LAST_STRUCTURE_H_
