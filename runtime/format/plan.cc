// Checks a plan before its first use.
#include "holdfast/plan.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "holdfast/ranks.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/file_names.h"
#include "runtime/format/tensor_parts.h"
#include "runtime/format/text.h"

namespace holdfast {
namespace {

/// Files end below this: offsets are signed in system calls, and the last write is rounded up.
constexpr uint64_t kFileBytesMax =
    uint64_t{std::numeric_limits<int64_t>::max()} / kIoAlignment * kIoAlignment;
/// Extents and tensors are counted in 32 bits; the last value means "no extent" or "no tensor".
constexpr uint64_t kCountMax = 0xfffffffe;
constexpr uint64_t kCrc32Bytes = 4;

absl::Status WrongPlan(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("plan: ", what));
}

std::string Range(uint64_t begin, uint64_t bytes) {
  return absl::StrCat("[", begin, ", ", begin + bytes, ")");
}

std::string FileLabel(const SavePlan& plan, size_t index) {
  return absl::StrCat("file ", format::Quoted(plan.files[index].name));
}

absl::Status CheckTensor(const SavePlan& plan, const PlannedTensor& tensor) {
  const std::string& name = tensor.name;
  if (name.empty()) return WrongPlan("a tensor's name is empty");
  if (!format::IsUtf8(name)) {
    return WrongPlan(absl::StrCat("tensor ", format::Quoted(name), ": the name is not UTF-8"));
  }
  if (!format::IsUtf8(tensor.dtype)) {
    return WrongPlan(absl::StrCat("tensor ", format::Quoted(name), ": the dtype is not UTF-8"));
  }
  for (const int64_t dimension : tensor.shape) {
    if (dimension < 0) {
      return WrongPlan(
          absl::StrCat("tensor ", format::Quoted(name), ": dimension ", dimension, " is negative"));
    }
  }
  if (tensor.file >= plan.files.size()) {
    return WrongPlan(absl::StrCat("tensor ", format::Quoted(name), ": file ", tensor.file, " of ",
                                  plan.files.size()));
  }
  if (tensor.begin > tensor.end || tensor.end > plan.files[tensor.file].bytes) {
    return WrongPlan(absl::StrCat(FileLabel(plan, tensor.file), ": tensor ", format::Quoted(name),
                                  " at bytes ", tensor.begin, " to ", tensor.end, " of ",
                                  plan.files[tensor.file].bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const SavePlan& plan) {
  if (plan.tensors.size() > kCountMax) return WrongPlan("more than 2^32 - 2 tensors");
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(plan.tensors.size());
  for (const PlannedTensor& tensor : plan.tensors) {
    HOLDFAST_RETURN_IF_ERROR(CheckTensor(plan, tensor));
    if (!names.insert(tensor.name).second) {
      return WrongPlan(
          absl::StrCat("tensor ", format::Quoted(tensor.name), ": the name occurs twice"));
    }
  }
  return absl::OkStatus();
}

/// Returns the fault of the checksum places in segment `index` of `file`; empty if valid.
std::string WrongSlots(const PlannedFile& file, size_t index) {
  const Segment& segment = file.segments[index];
  if (segment.crc32_slots.empty()) return "";
  if (segment.tensor != Segment::kLiteral) return "has places for checksums and is no literal";
  for (const Crc32Slot& slot : segment.crc32_slots) {
    if (segment.bytes < kCrc32Bytes || slot.offset > segment.bytes - kCrc32Bytes) {
      return absl::StrCat("has a place for a checksum at ", slot.offset, " of ", segment.bytes);
    }
    if (slot.segment >= index || file.segments[slot.segment].tensor == Segment::kLiteral) {
      return absl::StrCat("has a place for the checksum of segment ", slot.segment,
                          ", which is no tensor before it");
    }
  }
  return "";
}

/// Returns the fault of a segment, apart from its place; empty if valid.
std::string WrongSegment(const SavePlan& plan, size_t file, const Segment& segment) {
  if (segment.bytes == 0) return "is empty";
  if (segment.tensor == Segment::kLiteral) {
    if (segment.literal.size() == segment.bytes) return "";
    return absl::StrCat("is a literal of ", segment.literal.size(), " bytes");
  }
  if (segment.tensor >= plan.tensors.size()) {
    return absl::StrCat("is of tensor ", segment.tensor, " of ", plan.tensors.size());
  }
  const PlannedTensor& tensor = plan.tensors[segment.tensor];
  // One segment is one tensor: each part of a tensor is digested in one piece.
  if (tensor.file != file || segment.file_offset != tensor.begin ||
      segment.bytes != tensor.end - tensor.begin) {
    return absl::StrCat("is not the place of tensor ", format::Quoted(tensor.name),
                        ", which has bytes ", tensor.begin, " to ", tensor.end, " of file ",
                        tensor.file);
  }
  if (segment.data == nullptr) {
    return absl::StrCat("of tensor ", format::Quoted(tensor.name), " has no data");
  }
  return "";
}

/// Marks in `found` the tensors that have a segment.
absl::Status CheckFile(const SavePlan& plan, size_t index, std::vector<bool>* found) {
  const PlannedFile& file = plan.files[index];
  const char* const wrong_name = format::WrongNewFileName(file.name);
  if (wrong_name != nullptr)
    return WrongPlan(absl::StrCat(FileLabel(plan, index), ": ", wrong_name));
  if (file.bytes > kFileBytesMax) {
    return WrongPlan(absl::StrCat(FileLabel(plan, index), ": ", file.bytes, " bytes are too many"));
  }
  uint64_t end = 0;
  for (size_t i = 0; i < file.segments.size(); ++i) {
    const Segment& segment = file.segments[i];
    if (segment.file_offset != end) {
      return WrongPlan(absl::StrCat(FileLabel(plan, index), ": a segment begins at byte ",
                                    segment.file_offset, ", the one before it ends at ", end,
                                    segment.file_offset > end ? " (a gap)" : " (an overlap)"));
    }
    if (segment.bytes > file.bytes - end) {
      return WrongPlan(absl::StrCat(FileLabel(plan, index), ": a segment of ", segment.bytes,
                                    " bytes at byte ", end, " goes beyond the file's end at ",
                                    file.bytes));
    }
    std::string wrong = WrongSegment(plan, index, segment);
    if (wrong.empty()) wrong = WrongSlots(file, i);
    if (!wrong.empty()) {
      return WrongPlan(absl::StrCat(FileLabel(plan, index), ": the segment ",
                                    Range(end, segment.bytes), " ", wrong));
    }
    if (segment.tensor != Segment::kLiteral) (*found)[segment.tensor] = true;
    end += segment.bytes;
  }
  if (end != file.bytes) {
    return WrongPlan(absl::StrCat(FileLabel(plan, index), ": no segment for bytes ",
                                  Range(end, file.bytes - end)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidatePlan(const SavePlan& plan) {
  if (plan.files.size() > kCountMax) return WrongPlan("more than 2^32 - 2 files");
  HOLDFAST_RETURN_IF_ERROR(CheckTensors(plan));
  absl::flat_hash_set<absl::string_view> names;
  std::vector<bool> found(plan.tensors.size());
  uint64_t chunks = 0;
  for (size_t i = 0; i < plan.files.size(); ++i) {
    HOLDFAST_RETURN_IF_ERROR(CheckFile(plan, i, &found));
    if (!names.insert(plan.files[i].name).second) {
      return WrongPlan(absl::StrCat(FileLabel(plan, i), ": the name occurs twice"));
    }
    chunks += format::ChunkCount(plan.files[i].bytes);
    if (chunks > kCountMax) return WrongPlan("more than 2^32 - 2 chunks of 4 MiB");
  }
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const PlannedTensor& tensor = plan.tensors[i];
    if (found[i] || tensor.begin == tensor.end) continue;
    return WrongPlan(absl::StrCat(FileLabel(plan, tensor.file), ": tensor ",
                                  format::Quoted(tensor.name), " at bytes ", tensor.begin, " to ",
                                  tensor.end, " has no segment"));
  }
  return absl::OkStatus();
}

Digest DigestOf(const void* data, uint64_t bytes) { return digest::Of(data, bytes); }

}  // namespace holdfast
