// Planning a safetensors file: the order of the tensors and the header that tells it.
// Source of the format: the safetensors README, "Format".
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/dtype.h"
#include "runtime/format/file_names.h"
#include "runtime/format/safetensors.h"
#include "runtime/format/text.h"

namespace holdfast {
namespace format {
namespace {

constexpr absl::string_view kMetadataName = "__metadata__";

absl::Status Wrong(const TensorSource& tensor, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("plan safetensors: tensor ", Quoted(tensor.name), ": ", what));
}

/// What the planner knows about one tensor.
struct Item {
  uint32_t index = 0;      // into the given tensors
  uint32_t alignment = 1;  // the largest power of two that divides the element size, at most 64
  bool native = false;     // written under its own dtype
};

absl::StatusOr<Item> Examine(const TensorSource& tensor) {
  if (tensor.name.empty()) return Wrong(tensor, "the name is empty");
  if (tensor.name == kMetadataName) return Wrong(tensor, "the name is the format's own");
  if (!IsUtf8(tensor.name)) return Wrong(tensor, "the name is not UTF-8");
  if (!IsUtf8(tensor.dtype)) return Wrong(tensor, "the dtype is not UTF-8");
  if (tensor.data == nullptr && tensor.bytes != 0) return Wrong(tensor, "it has no data");
  const absl::StatusOr<uint64_t> elements = ElementCount(tensor.shape);
  if (!elements.ok()) return Wrong(tensor, elements.status().message());
  const Dtype* const dtype = FindDtype(tensor.dtype);
  uint64_t element_bytes = 0;
  if (dtype != nullptr) {
    const absl::StatusOr<uint64_t> bytes = TensorBytes(*dtype, *elements);
    if (!bytes.ok()) return Wrong(tensor, bytes.status().message());
    if (*bytes != tensor.bytes) {
      return Wrong(tensor,
                   absl::StrCat(tensor.bytes, " bytes given, shape and dtype make ", *bytes));
    }
    element_bytes = std::max(1u, dtype->bits / 8);
  } else if (*elements != 0 && tensor.bytes % *elements == 0) {
    element_bytes = tensor.bytes / *elements;
  }
  Item item;
  item.native = dtype != nullptr && dtype->native;
  if (element_bytes != 0) item.alignment = 1u << std::min(6, std::countr_zero(element_bytes));
  return item;
}

class Planner {
 public:
  Planner(absl::Span<const TensorSource> tensors, const SafetensorsOptions& options)
      : tensors_(tensors), options_(options) {}

  absl::StatusOr<SavePlan> Plan(const std::string& file_name) {
    const char* const wrong = WrongNewFileName(file_name);
    if (wrong != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan safetensors: file ", Quoted(file_name), ": ", wrong));
    }
    HOLDFAST_RETURN_IF_ERROR(ExamineAll());
    HOLDFAST_RETURN_IF_ERROR(CheckMetadata());
    HOLDFAST_ASSIGN_OR_RETURN(std::string header, Header());
    return Assemble(file_name, std::move(header));
  }

 private:
  absl::Status ExamineAll() {
    if (tensors_.size() > 0xfffffffe) {
      return absl::InvalidArgumentError("plan safetensors: more than 2^32 - 2 tensors");
    }
    absl::flat_hash_set<absl::string_view> names;
    names.reserve(tensors_.size());
    items_.reserve(tensors_.size());
    for (const TensorSource& tensor : tensors_) {
      HOLDFAST_ASSIGN_OR_RETURN(Item item, Examine(tensor));
      item.index = static_cast<uint32_t>(items_.size());
      items_.push_back(item);
      if (!names.insert(tensor.name).second) return Wrong(tensor, "the name occurs twice");
      // Room for the header and for rounding up is kept below the largest file offset.
      if (__builtin_add_overflow(data_bytes_, tensor.bytes, &data_bytes_) ||
          data_bytes_ > uint64_t{std::numeric_limits<int64_t>::max()} - (uint64_t{1} << 30)) {
        return Wrong(tensor, "the file would have more than 2^63 - 1 bytes");
      }
    }
    // Descending powers of two: what stands before a tensor is a multiple of its alignment.
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.alignment > b.alignment; });
    return absl::OkStatus();
  }

  absl::Status CheckMetadata() const {
    absl::flat_hash_set<absl::string_view> keys;
    for (const auto& [key, value] : options_.metadata) {
      const auto wrong = [&name = key](absl::string_view what) {
        return absl::InvalidArgumentError(
            absl::StrCat("plan safetensors: metadata ", Quoted(name), ": ", what));
      };
      if (!IsUtf8(key) || !IsUtf8(value)) return wrong("not UTF-8");
      if (key == kDtypesKey) return wrong("the key is Holdfast's own");
      if (!keys.insert(key).second) return wrong("the key occurs twice");
    }
    return absl::OkStatus();
  }

  /// {"name":{"dtype":"C128","shape":[2,3]},...}, empty if all dtypes are safetensors' own.
  std::string TrueDtypes() const {
    std::string json;
    for (const Item& item : items_) {
      if (item.native) continue;
      const TensorSource& tensor = tensors_[item.index];
      json.push_back(json.empty() ? '{' : ',');
      AppendJsonString(tensor.name, &json);
      json.append(":{\"dtype\":");
      AppendJsonString(tensor.dtype, &json);
      json.append(",\"shape\":");
      AppendShape(tensor.shape, &json);
      json.push_back('}');
    }
    if (!json.empty()) json.push_back('}');
    return json;
  }

  void AppendMetadata(std::string* json) const {
    const std::string dtypes = TrueDtypes();
    if (options_.metadata.empty() && dtypes.empty()) return;
    AppendJsonString(kMetadataName, json);
    json->append(":{");
    bool first = true;
    const auto append = [&](absl::string_view key, absl::string_view value) {
      if (!first) json->push_back(',');
      first = false;
      AppendJsonString(key, json);
      json->push_back(':');
      AppendJsonString(value, json);
    };
    for (const auto& [key, value] : options_.metadata) append(key, value);
    if (!dtypes.empty()) append(kDtypesKey, dtypes);
    json->push_back('}');
  }

  /// The file's first bytes: the length, the JSON, and blanks up to the alignment of direct I/O, so
  /// that the data of the first tensor can be read and written without a detour.
  absl::StatusOr<std::string> Header() const {
    size_t expected = 2 * kIoAlignment;
    for (const TensorSource& tensor : tensors_) {
      expected += 96 + tensor.name.size() + tensor.dtype.size() + 21 * tensor.shape.size();
    }
    std::string header;
    header.reserve(expected);
    header.append(8, '\0');
    header.push_back('{');
    AppendMetadata(&header);
    uint64_t begin = 0;
    for (const Item& item : items_) {
      if (header.back() != '{') header.push_back(',');
      AppendEntry(item, begin, &header);
      begin += tensors_[item.index].bytes;
    }
    header.push_back('}');
    header.append((kIoAlignment - header.size() % kIoAlignment) % kIoAlignment, ' ');
    const uint64_t length = header.size() - 8;
    if (length > kSafetensorsHeaderMax) {
      return absl::InvalidArgumentError(absl::StrCat("plan safetensors: a header of ", length,
                                                     " bytes is over the format's limit of ",
                                                     kSafetensorsHeaderMax));
    }
    for (size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(length >> (8 * i) & 0xff);
    return header;
  }

  void AppendEntry(const Item& item, uint64_t begin, std::string* json) const {
    const TensorSource& tensor = tensors_[item.index];
    AppendJsonString(tensor.name, json);
    json->append(":{\"dtype\":\"");
    if (item.native) {
      json->append(tensor.dtype);
      json->append("\",\"shape\":");
      AppendShape(tensor.shape, json);
    } else {
      json->append("U8\",\"shape\":[");
      AppendNumber(tensor.bytes, json);
      json->push_back(']');
    }
    json->append(",\"data_offsets\":[");
    AppendNumber(begin, json);
    json->push_back(',');
    AppendNumber(begin + tensor.bytes, json);
    json->append("]}");
  }

  SavePlan Assemble(const std::string& file_name, std::string header) const {
    SavePlan plan;
    PlannedFile& file = plan.files.emplace_back();
    file.name = file_name;
    file.segments.reserve(1 + items_.size());
    plan.tensors.reserve(items_.size());
    Segment& literal = file.segments.emplace_back();
    literal.bytes = header.size();
    literal.literal = std::move(header);
    uint64_t begin = literal.bytes;
    for (const Item& item : items_) {
      const TensorSource& source = tensors_[item.index];
      PlannedTensor& tensor = plan.tensors.emplace_back();
      tensor.name = source.name;
      tensor.dtype = source.dtype;
      tensor.shape = source.shape;
      tensor.begin = begin;
      tensor.end = begin + source.bytes;
      if (source.bytes != 0) {
        Segment& segment = file.segments.emplace_back();
        segment.file_offset = begin;
        segment.bytes = source.bytes;
        segment.tensor = static_cast<uint32_t>(plan.tensors.size() - 1);
        segment.data = source.data;
        segment.device = source.device;
        segment.stream = source.stream;
      }
      begin = tensor.end;
    }
    file.bytes = begin;
    return plan;
  }

  absl::Span<const TensorSource> tensors_;
  const SafetensorsOptions& options_;
  std::vector<Item> items_;  // in file order
  uint64_t data_bytes_ = 0;
};

}  // namespace
}  // namespace format

absl::StatusOr<SavePlan> PlanSafetensors(const std::string& file_name,
                                         absl::Span<const TensorSource> tensors,
                                         const SafetensorsOptions& options) {
  if (options.attempt == AttemptId()) return format::Planner(tensors, options).Plan(file_name);
  char hex[32];
  digest::ToHex(options.attempt, hex);
  SafetensorsOptions with_attempt = options;
  with_attempt.metadata.emplace_back(format::kAttemptKey, std::string(hex, sizeof(hex)));
  return format::Planner(tensors, with_attempt).Plan(file_name);
}

}  // namespace holdfast
