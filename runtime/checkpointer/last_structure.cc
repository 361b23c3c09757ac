#include "runtime/checkpointer/last_structure.h"

#include <utility>

#include "runtime/base/status.h"

namespace holdfast::checkpointer {

absl::StatusOr<std::shared_ptr<const format::SafetensorsStructure>> LastStructure::Of(
    const std::string& file_name, absl::Span<const TensorSource> tensors) {
  std::shared_ptr<const format::SafetensorsStructure> last;
  {
    const base::MutexLock lock(&mutex_);
    last = kept_;
  }
  if (last != nullptr && last->Describes(file_name, tensors)) return last;
  HOLDFAST_ASSIGN_OR_RETURN(format::SafetensorsStructure made,
                            format::PackSafetensors(file_name, tensors));
  auto structure = std::make_shared<const format::SafetensorsStructure>(std::move(made));
  // The previous structure is destroyed after the unlock.
  last = structure->memory_bytes() <= kKeptBytesMax ? structure : nullptr;
  const base::MutexLock lock(&mutex_);
  kept_.swap(last);
  return structure;
}

}  // namespace holdfast::checkpointer
