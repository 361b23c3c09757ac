#include "tests/testing/framed_plan.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::testing {
namespace {

constexpr uint32_t kCrcBytes = 4;
// Not zero, so that an unfilled place differs from the checksum of no bytes.
constexpr char kFill = 'f';
constexpr char kUnfilled = '?';

uint32_t Crc32(const char* data, uint64_t bytes) {
  return static_cast<uint32_t>(
      crc32_z(0, reinterpret_cast<const Bytef*>(data), static_cast<z_size_t>(bytes)));
}

class FileWriter {
 public:
  explicit FileWriter(SavePlan* plan) : plan_(plan) {}

  /// `filled` bytes and then a place for the checksum of each of `segments`.
  void AddLiteral(uint64_t filled, const std::vector<uint32_t>& segments) {
    Segment literal;
    for (const uint32_t segment : segments) {
      literal.literal.append(filled, kFill);
      literal.crc32_slots.push_back({.offset = literal.literal.size(), .segment = segment});
      literal.literal.append(kCrcBytes, kUnfilled);
    }
    if (segments.empty()) literal.literal.append(filled, kFill);
    literal.bytes = literal.literal.size();
    if (literal.bytes != 0) Add(std::move(literal));
  }

  /// Index of the tensor's segment.
  uint32_t AddTensor(const TensorSource& source) {
    PlannedTensor tensor;
    tensor.name = source.name;
    tensor.dtype = source.dtype;
    tensor.shape = source.shape;
    tensor.begin = file().bytes;
    tensor.end = tensor.begin + source.bytes;
    Segment segment;
    segment.bytes = source.bytes;
    segment.tensor = static_cast<uint32_t>(plan_->tensors.size());
    segment.data = source.data;
    segment.device = source.device;
    segment.stream = source.stream;
    plan_->tensors.push_back(std::move(tensor));
    Add(std::move(segment));
    return static_cast<uint32_t>(file().segments.size() - 1);
  }

  PlannedFile& file() { return plan_->files.back(); }

 private:
  void Add(Segment segment) {
    segment.file_offset = file().bytes;
    file().bytes += segment.bytes;
    file().segments.push_back(std::move(segment));
  }

  SavePlan* plan_;
};

}  // namespace

SavePlan FramedPlan(absl::Span<const TensorSource> tensors, const Framing& framing) {
  SavePlan plan;
  plan.files.emplace_back().name = framing.file_name;
  FileWriter writer(&plan);
  std::vector<uint32_t> segments;
  for (const TensorSource& tensor : tensors) {
    if (tensor.bytes == 0) continue;
    const uint64_t over = framing.alignment == 0 ? 0 : writer.file().bytes % framing.alignment;
    if (over != 0) writer.AddLiteral(framing.alignment - over, {});
    segments.push_back(writer.AddTensor(tensor));
    writer.AddLiteral(framing.behind_bytes, {segments.back()});
  }
  if (framing.directory_bytes != 0) writer.AddLiteral(framing.directory_bytes, segments);
  return plan;
}

std::string WrongFraming(const SavePlan& plan, const PlannedFile& file, const std::string& bytes) {
  if (bytes.size() != file.bytes) {
    return absl::StrCat(bytes.size(), " bytes instead of ", file.bytes);
  }
  for (const Segment& segment : file.segments) {
    if (segment.tensor != Segment::kLiteral) continue;
    std::string expected = segment.literal;
    for (const Crc32Slot& slot : segment.crc32_slots) {
      const Segment& tensor = file.segments[slot.segment];
      const uint32_t crc = Crc32(bytes.data() + tensor.file_offset, tensor.bytes);
      for (uint32_t i = 0; i < kCrcBytes; ++i) {
        expected[slot.offset + i] = static_cast<char>(crc >> (8 * i) & 0xff);
      }
    }
    const auto found = std::mismatch(expected.begin(), expected.end(),
                                     bytes.begin() + static_cast<int64_t>(segment.file_offset));
    if (found.first == expected.end()) continue;
    return absl::StrCat("byte ",
                        segment.file_offset + static_cast<uint64_t>(found.first - expected.begin()),
                        " of the literal at ", segment.file_offset, " of ", file.name, " (",
                        plan.tensors.size(), " tensors)");
  }
  return "";
}

}  // namespace holdfast::testing
