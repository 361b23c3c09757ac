// Parses safetensors headers, strictly, and plans them for saves. (plan.h has the public
// PlanSafetensors.)
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

/// Key of `__metadata__` for the attempt id. A Holdfast file without its manifest is thereby known
/// to be incomplete.
inline constexpr char kAttemptKey[] = "holdfast.attempt";
/// Key of `__metadata__` for the true dtypes and shapes, as JSON, of tensors without a safetensors
/// dtype.
inline constexpr char kDtypesKey[] = "holdfast.dtypes";

/// One rank's safetensors file without the attempt id and the tensors' bytes: shared by saves of
/// the same tensors.
struct SafetensorsStructure {
  PackedPlan plan;              // literals[0] ends behind the quoted attempt id, see HeadFor.
  std::vector<uint32_t> order;  // By tensor of the plan: index into the given tensors.

  /// True if PackSafetensors returns an equal structure for these arguments. Compares everything.
  bool Describes(const std::string& file_name, absl::Span<const TensorSource> tensors) const;
  /// Returns literals[0] of a save.
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

/// Parses a header. `prefix` is the first 8 + N bytes of a file of `file_bytes`, N the header's
/// length (see HeaderLength). Tensors are in file order; tensors stored as bytes have their true
/// dtype and shape.
/// \error kDataLoss with the place: length over the limit or the file, bad JSON, duplicate or
/// unknown keys, overlap, holes, a size that does not match shape and dtype, trailing bytes;
/// kUnimplemented for an unknown dtype.
absl::StatusOr<SafetensorsHeader> ParseSafetensors(absl::string_view prefix, uint64_t file_bytes);

/// Returns N from the first 8 bytes, checked against both limits.
absl::StatusOr<uint64_t> HeaderLength(absl::string_view first8, uint64_t file_bytes);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_SAFETENSORS_H_
