#include "runtime/format/dtype.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "holdfast/plan.h"

namespace holdfast::format {
namespace {

// Source: safetensors' tensor.rs, enum Dtype, at 0.8. Most frequent first: the list is searched
// once per tensor, inside the caller's stall.
constexpr Dtype kDtypes[] = {
    {"BF16", 16, true},        {"F32", 32, true},
    {"F16", 16, true},         {"I64", 64, true},
    {"U8", 8, true},           {"F8_E4M3", 8, true},
    {"F8_E5M2", 8, true},      {"F8_E8M0", 8, true},
    {"BOOL", 8, true},         {"I32", 32, true},
    {"F64", 64, true},         {"I8", 8, true},
    {"I16", 16, true},         {"U16", 16, true},
    {"U32", 32, true},         {"U64", 64, true},
    {"C64", 64, false},  // since 0.7
    {"F8_E4M3FNUZ", 8, false}, {"F8_E5M2FNUZ", 8, false},
    {"F4", 4, false},  // since 0.6, but frameworks disagree about the unit of its shape
    {"F6_E2M3", 6, false},     {"F6_E3M2", 6, false},
};

}  // namespace

const Dtype* FindDtype(absl::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.name == name) return &dtype;
  }
  return nullptr;
}

absl::StatusOr<uint64_t> ElementCount(absl::Span<const int64_t> shape) {
  uint64_t count = 1;
  for (const int64_t dimension : shape) {
    if (dimension < 0) {
      return absl::InvalidArgumentError(absl::StrCat("dimension ", dimension, " is negative"));
    }
    if (__builtin_mul_overflow(count, static_cast<uint64_t>(dimension), &count)) {
      return absl::InvalidArgumentError("its shape has more than 2^64 - 1 elements");
    }
  }
  return count;
}

absl::StatusOr<uint64_t> TensorBytes(const Dtype& dtype, uint64_t elements) {
  uint64_t bits = 0;
  if (dtype.bits % 8 == 0) {
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(elements, uint64_t{dtype.bits / 8}, &bytes)) {
      return absl::InvalidArgumentError("it has more than 2^64 - 1 bytes");
    }
    return bytes;
  }
  if (__builtin_mul_overflow(elements, uint64_t{dtype.bits}, &bits)) {
    return absl::InvalidArgumentError("it has more than 2^64 - 1 bits");
  }
  if (bits % 8 != 0) return absl::InvalidArgumentError("it ends within a byte");
  return bits / 8;
}

}  // namespace holdfast::format

namespace holdfast {

uint32_t DtypeBytes(const std::string& dtype) {
  const format::Dtype* found = format::FindDtype(dtype);
  return found != nullptr && found->bits % 8 == 0 ? found->bits / 8 : 0;
}

}  // namespace holdfast
