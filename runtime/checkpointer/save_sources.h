// What a save writes and where its bytes come from: the packed plan, the literals, the tensors.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_SAVE_SOURCES_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_SAVE_SOURCES_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "runtime/format/safetensors.h"
#include "runtime/writer/job_table.h"
#include "runtime/writer/save_state.h"

namespace holdfast::checkpointer {

/// Gives `save` the plan of `structure`, which describes `tensors`, the header of `attempt`, and
/// the device streams of the tensors. Returns the sources of the plan's bytes.
writer::Sources TakeStructure(std::shared_ptr<const format::SafetensorsStructure> structure,
                              absl::Span<const TensorSource> tensors, const AttemptId& attempt,
                              SaveState* save);

/// The same for a plan of the caller's own. \error As ValidatePlan.
absl::StatusOr<writer::Sources> TakePlan(const SavePlan& plan, SaveState* save);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_SAVE_SOURCES_H_
