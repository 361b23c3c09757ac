// Reading safetensors headers, strictly. (Planning them is the public PlanSafetensors.)
#ifndef HOLDFAST_RUNTIME_FORMAT_SAFETENSORS_H_
#define HOLDFAST_RUNTIME_FORMAT_SAFETENSORS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "holdfast/plan.h"

namespace holdfast::format {

/// safetensors' own limit of a header, in bytes.
inline constexpr uint64_t kSafetensorsHeaderMax = 100'000'000;

/// Key of `__metadata__` that carries the attempt id, so that a Holdfast file whose manifest is
/// missing is known to be incomplete.
inline constexpr char kAttemptKey[] = "holdfast.attempt";
/// Key of `__metadata__` that carries true dtypes and shapes of tensors that safetensors has no
/// dtype for, as JSON.
inline constexpr char kDtypesKey[] = "holdfast.dtypes";

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
