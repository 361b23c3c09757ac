// Reading safetensors headers, strictly, and planning them for saves. (The public PlanSafetensors
// is in plan.h.)
#ifndef HOLDFAST_RUNTIME_FORMAT_SAFETENSORS_H_
#define HOLDFAST_RUNTIME_FORMAT_SAFETENSORS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "runtime/format/packed_plan.h"

namespace holdfast::format {

/// safetensors' own limit of a header, in bytes.
inline constexpr uint64_t kSafetensorsHeaderMax = 100'000'000;

/// Key of `__metadata__` that carries the attempt id, so that a Holdfast file whose manifest is
/// missing is known to be incomplete.
inline constexpr char kAttemptKey[] = "holdfast.attempt";
/// Key of `__metadata__` that carries true dtypes and shapes of tensors that safetensors has no
/// dtype for, as JSON.
inline constexpr char kDtypesKey[] = "holdfast.dtypes";

/// One rank's safetensors file without its attempt id and its tensors' bytes: what saves of the
/// same tensors share.
struct SafetensorsStructure {
  PackedPlan plan;              // literals[0] ends behind the quoted attempt id, see HeadFor.
  std::vector<uint32_t> order;  // By tensor of the plan: index into the given tensors.

  /// Whether it is what PackSafetensors returns for these. Compares everything.
  bool Describes(const std::string& file_name, absl::Span<const TensorSource> tensors) const;
  /// literals[0] of a save.
  std::string HeadFor(const AttemptId& attempt) const;
  size_t memory_bytes() const { return plan.memory_bytes() + order.size() * sizeof(uint32_t); }
};

/// Plans and refuses as PlanSafetensors does with an attempt id and no metadata.
absl::StatusOr<SafetensorsStructure> PackSafetensors(const std::string& file_name,
                                                     absl::Span<const TensorSource> tensors);

struct SafetensorsHeader {
  uint64_t data_begin = 0;  ///< Of the file: 8 + header length.
  std::vector<PlannedTensor>
      tensors;  ///< `begin` and `end` count from the file's first byte; `file` is 0.
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// `prefix` is the first 8 + N bytes of a file of `file_bytes`, N the header's length (see
/// HeaderLength). Tensors come back in file order, those that were stored as bytes with their true
/// dtype and shape. \error kDataLoss saying where: length over the limit or the file, bad JSON,
/// duplicate or unknown keys, overlap, holes, a size that does not match shape and dtype, trailing
/// bytes; kUnimplemented for a dtype that this version does not know.
absl::StatusOr<SafetensorsHeader> ParseSafetensors(absl::string_view prefix, uint64_t file_bytes);

/// N from the first 8 bytes, checked against both limits.
absl::StatusOr<uint64_t> HeaderLength(absl::string_view first8, uint64_t file_bytes);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_SAFETENSORS_H_
