// What to write: tensors, the files that they go to, and the exact place of every byte.
//
// A plan is pure data. The layout in memory is the layout in the file: a tensor is copied to the
// place in the staging arena that corresponds to its place in the file, so there is no
// serialization step.
#ifndef HOLDFAST_PLAN_H_
#define HOLDFAST_PLAN_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "holdfast/device.h"
#include "holdfast/pod.h"

namespace holdfast {

/// A tensor to save: contiguous, row-major bytes at `data`.
struct TensorSource {
  std::string name;  ///< UTF-8, unique in the checkpoint, not empty.
  std::string
      dtype;  ///< safetensors' names: "F32", "BF16", "I64", "BOOL", ... Others are kept as bytes.
  std::vector<int64_t> shape;     ///< Elements per dimension; empty for a 0-d tensor.
  const void* data = nullptr;     ///< May be null when `bytes` is 0.
  uint64_t bytes = 0;             ///< For known dtypes: product(shape) * element size, checked.
  Device* device = nullptr;       ///< Where `data` lives; null is the host.
  StreamHandle stream = nullptr;  ///< The stream that last wrote it; copies are ordered after that.
};

/// A tensor's place: bytes [begin, end) of a file.
struct PlannedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint32_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// A place in a literal for the CRC-32 of a tensor's bytes, which are not known before they are
/// staged: zip framing.
struct Crc32Slot {
  uint64_t offset = 0;   ///< In the literal, of four bytes, little endian.
  uint32_t segment = 0;  ///< Index of an earlier segment of the same file, a tensor's.
};

/// A run of a file's bytes and where they come from: a whole tensor, or bytes of the format's own
/// (headers, framing). Never empty: a tensor without bytes has no segment.
struct Segment {
  static constexpr uint32_t kLiteral = 0xffffffffu;
  uint64_t file_offset = 0;
  uint64_t bytes = 0;
  uint32_t tensor = kLiteral;  ///< Index into SavePlan::tensors, or kLiteral.
  const void* data =
      nullptr;  ///< The tensor's bytes; null for a literal, whose bytes are in `literal`.
  std::string literal;
  std::vector<Crc32Slot> crc32_slots;  ///< Filled while the save is staged; of literals only.
  Device* device = nullptr;            ///< Null is the host.
  StreamHandle stream = nullptr;
};

/// One file: its segments cover [0, bytes) in order, without gap or overlap.
struct PlannedFile {
  std::string name;  ///< One path component: no '/', not "." or "..".
  uint64_t bytes = 0;
  std::vector<Segment> segments;
};

/// Everything that one rank writes in one save. The tensors' data must stay valid and unchanged
/// until the save has *staged*, the plan itself only until the call that takes it returns.
struct SavePlan {
  std::vector<PlannedFile> files;
  std::vector<PlannedTensor> tensors;

  uint64_t total_bytes() const {
    uint64_t bytes = 0;
    for (const PlannedFile& file : files) bytes += file.bytes;
    return bytes;
  }
};

/// Checks a plan: names, duplicates, overlapping, missing or out-of-range segments, tensors whose
/// range is not that of their one segment, places for checksums that are none. File names may not
/// be those of rank manifests, nor end in ".tmp", nor have more than 251 bytes (a file is NAME.tmp
/// while it is written). \error kInvalidArgument naming the file, the range and what is wrong.
absl::Status ValidatePlan(const SavePlan& plan);

/// Options of PlanSafetensors.
struct SafetensorsOptions {
  /// Free text that goes to `__metadata__`, beside what Holdfast puts there.
  std::vector<std::pair<std::string, std::string>> metadata;
  /// Put there, too, so that a file whose manifest is missing is known to be incomplete. None: not.
  AttemptId attempt;
};

/// Plans one safetensors file: tensors in descending element size, then in the given order (so they
/// stand in the plan, too); the header padded with blanks so that data starts at a multiple of
/// kIoAlignment. A dtype that safetensors 0.6 does not read is written as bytes, with the true one
/// in `__metadata__` and in the manifest. \error kInvalidArgument for duplicate or empty names,
/// names that are not UTF-8, sizes that do not match shape and dtype, or a header over safetensors'
/// limit of 100 MB. Source of the format: the safetensors README, "Format".
absl::StatusOr<SavePlan> PlanSafetensors(const std::string& file_name,
                                         absl::Span<const TensorSource> tensors,
                                         const SafetensorsOptions& options);

/// Bytes per element of a safetensors dtype name, 0 for an unknown one.
uint32_t DtypeBytes(const std::string& dtype);

}  // namespace holdfast

#endif  // HOLDFAST_PLAN_H_
