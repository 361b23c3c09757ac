#include "runtime/checkpointer/save_sources.h"

#include <cstdint>
#include <string>

#include "runtime/base/status.h"
#include "runtime/format/packed_plan.h"
#include "runtime/writer/checksums.h"

namespace holdfast::checkpointer {
namespace {

/// Of a tensor or of its segment.
template <typename Tensor>
writer::PieceSource SourceOf(const Tensor& tensor, SaveState* save) {
  Device* const device =
      tensor.device != nullptr && !tensor.device->is_host() ? tensor.device : nullptr;
  if (device != nullptr && tensor.bytes != 0) save->streams.insert({device, tensor.stream});
  return {.data = static_cast<const char*>(tensor.data), .device = device};
}

}  // namespace

writer::Sources TakeStructure(std::shared_ptr<const format::SafetensorsStructure> structure,
                              absl::Span<const TensorSource> tensors, const AttemptId& attempt,
                              SaveState* save) {
  save->plan = std::shared_ptr<const format::PackedPlan>(structure, &structure->plan);
  save->head = structure->HeadFor(attempt);
  writer::Sources sources;
  sources.literals = {save->head.data(), save->plan->literals[1].data()};
  sources.tensors.reserve(tensors.size());
  for (const uint32_t index : structure->order) {
    sources.tensors.push_back(SourceOf(tensors[index], save));
  }
  return sources;
}

absl::StatusOr<writer::Sources> TakePlan(const SavePlan& plan, SaveState* save) {
  HOLDFAST_RETURN_IF_ERROR(ValidatePlan(plan));
  save->checksums = writer::Checksums::For(plan);
  save->plan = std::make_shared<const format::PackedPlan>(format::Pack(plan));
  writer::Sources sources;
  for (const std::string& literal : save->plan->literals)
    sources.literals.push_back(literal.data());
  sources.tensors.resize(plan.tensors.size());
  for (const PlannedFile& file : plan.files) {
    for (const Segment& segment : file.segments) {
      if (segment.tensor != Segment::kLiteral)
        sources.tensors[segment.tensor] = SourceOf(segment, save);
    }
  }
  return sources;
}

}  // namespace holdfast::checkpointer
