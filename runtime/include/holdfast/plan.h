// Plans a save: tensors, their files, and the exact place of every byte.
//
// A plan is pure data. The layout in memory equals the layout in the file: each tensor is copied to
// the place in the staging arena that corresponds to the place in the file, without a serialization
// step.
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
  /// safetensors' names: "F32", "BF16", "I64", "BOOL", ... Tensors of other dtypes are kept as
  /// bytes.
  std::string dtype;
  std::vector<int64_t> shape;  ///< Elements per dimension; empty for a 0-d tensor.
  const void* data = nullptr;  ///< May be null when `bytes` is 0.
  uint64_t bytes = 0;          ///< For known dtypes: product(shape) * element size, checked.
  Device* device = nullptr;    ///< Memory of `data`; null is the host.
  /// Stream of the last write to `data`; copies are ordered after that write.
  StreamHandle stream = nullptr;
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

/// Four bytes of a literal (zip framing) for the CRC-32 of a tensor's bytes. The CRC is unknown
/// until the tensor is staged.
struct Crc32Slot {
  uint64_t offset = 0;   ///< In the literal, of four bytes, little endian.
  uint32_t segment = 0;  ///< Index of the tensor's segment, earlier in the same file.
};

/// A run of a file's bytes and its source: a whole tensor, or bytes of the format (headers,
/// framing). Never empty: a tensor without bytes has no segment.
struct Segment {
  static constexpr uint32_t kLiteral = 0xffffffffu;
  uint64_t file_offset = 0;
  uint64_t bytes = 0;
  uint32_t tensor = kLiteral;  ///< Index into SavePlan::tensors, or kLiteral.
  const void* data = nullptr;  ///< The tensor's bytes; null for a literal.
  std::string literal;
  std::vector<Crc32Slot> crc32_slots;  ///< For literals only; filled while the save is staged.
  Device* device = nullptr;            ///< Null is the host.
  StreamHandle stream = nullptr;
};

/// One file: its segments cover [0, bytes) in order, without gap or overlap.
struct PlannedFile {
  std::string name;  ///< One path component: no '/', not "." or "..".
  uint64_t bytes = 0;
  std::vector<Segment> segments;
  /// Every rank plans this file with equal bytes. Rank 0 writes the file; the other ranks stage and
  /// digest their bytes, and the save fails with kFailedPrecondition unless all digests agree. Not
  /// for saves of files only (SaveRequest::files_only).
  bool replicated = false;
};

/// The files that one rank writes in one save. The tensors' data must stay valid and unchanged
/// until the save has *staged*, the plan itself only until the call returns.
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
/// range differs from their segment's, CRC slots outside their literal. A file name must not be a
/// rank manifest's name, must not end in ".tmp", and has at most 251 bytes (a file is NAME.tmp
/// until complete).
/// \error kInvalidArgument naming the file, the range and the reason.
absl::Status ValidatePlan(const SavePlan& plan);

/// Options of PlanSafetensors.
struct SafetensorsOptions {
  /// Free text for `__metadata__`, beside Holdfast's own entries.
  std::vector<std::pair<std::string, std::string>> metadata;
  /// Attempt id for `__metadata__`: a file without a manifest is then known to be incomplete. Zero:
  /// left out.
  AttemptId attempt;
};

/// Plans one safetensors file. Tensors are ordered by descending element size, then in the given
/// order, in the file and in the plan. Blanks pad the header, so that data starts at a multiple of
/// kIoAlignment. A dtype unknown to safetensors 0.6 is written as bytes; `__metadata__` and the
/// manifest hold the true dtype. Source of the format: the safetensors README, "Format".
/// \error kInvalidArgument for duplicate or empty names, names that are not UTF-8, sizes that do
/// not match shape and dtype, or a header over safetensors' limit of 100 MB.
absl::StatusOr<SavePlan> PlanSafetensors(const std::string& file_name,
                                         absl::Span<const TensorSource> tensors,
                                         const SafetensorsOptions& options);

/// Bytes per element of a safetensors dtype name, 0 for an unknown one.
uint32_t DtypeBytes(const std::string& dtype);

}  // namespace holdfast

#endif  // HOLDFAST_PLAN_H_
