// The dtypes of the safetensors format: element sizes, and the dtypes that are written natively.
#ifndef HOLDFAST_RUNTIME_FORMAT_DTYPE_H_
#define HOLDFAST_RUNTIME_FORMAT_DTYPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace holdfast::format {

struct Dtype {
  absl::string_view name;
  uint32_t bits = 0;  ///< Of one element; some are smaller than a byte.
  /// Written under its own name. A reader with one unknown dtype refuses the whole file. So dtypes
  /// that safetensors 0.6 (2025-06) lacks are written as bytes.
  bool native = false;
};

/// Returns null for a name that safetensors (0.8) does not have.
const Dtype* FindDtype(absl::string_view name);

/// product(shape). \error kInvalidArgument for a negative dimension or a product over 2^64 - 1.
absl::StatusOr<uint64_t> ElementCount(absl::Span<const int64_t> shape);

/// Bytes of `elements` elements. \error kInvalidArgument for a product over 2^64 - 1 or a broken
/// last byte.
absl::StatusOr<uint64_t> TensorBytes(const Dtype& dtype, uint64_t elements);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_DTYPE_H_
