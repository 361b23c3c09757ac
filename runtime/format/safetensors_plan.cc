// Plans a safetensors file: the order of the tensors and the header. Source of the format: the
// safetensors README, "Format".
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/dtype.h"
#include "runtime/format/file_names.h"
#include "runtime/format/packed_plan.h"
#include "runtime/format/safetensors.h"
#include "runtime/format/text.h"

namespace holdfast {
namespace format {
namespace {

constexpr absl::string_view kMetadataName = "__metadata__";
constexpr size_t kAttemptDigits = 32;

absl::Status WrongSource(const TensorSource& tensor, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("plan safetensors: tensor ", Quoted(tensor.name), ": ", what));
}

/// The planner's data of one tensor.
struct Item {
  uint8_t level = 0;    // log2 of the largest power of two that divides the element size, at most 6
  bool native = false;  // written under its own dtype
};
constexpr int kLevels = 7;

/// Finds a duplicate name. A slot is an index and a part of the name's hash, so a name touches one
/// cache line, which is fetched ahead.
class NameCheck {
 public:
  explicit NameCheck(absl::Span<const TensorSource> tensors)
      : tensors_(tensors), slots_(std::bit_ceil(2 * tensors.size() + 1)) {}

  /// Returns the first tensor whose name an earlier tensor has; null without a duplicate.
  const TensorSource* FindDuplicate() {
    uint64_t hashes[kAhead];
    for (size_t first = 0; first < tensors_.size(); first += kAhead) {
      const size_t count = std::min(kAhead, tensors_.size() - first);
      for (size_t i = 0; i < count; ++i) {
        hashes[i] = absl::Hash<absl::string_view>{}(tensors_[first + i].name);
        __builtin_prefetch(&slots_[hashes[i] & (slots_.size() - 1)], 1);
      }
      for (size_t i = 0; i < count; ++i) {
        if (!Insert(first + i, hashes[i])) return &tensors_[first + i];
      }
    }
    return nullptr;
  }

 private:
  struct Slot {
    uint32_t index = 0;  // plus one; 0: free
    uint32_t tag = 0;
  };
  static constexpr size_t kAhead = 32;

  bool Insert(size_t index, uint64_t hash) {
    const auto tag = static_cast<uint32_t>(hash >> 32);
    size_t at = hash & (slots_.size() - 1);
    for (; slots_[at].index != 0; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at].tag == tag && tensors_[slots_[at].index - 1].name == tensors_[index].name)
        return false;
    }
    slots_[at] = {.index = static_cast<uint32_t>(index + 1), .tag = tag};
    return true;
  }

  absl::Span<const TensorSource> tensors_;
  std::vector<Slot> slots_;
};

class Planner {
 public:
  Planner(absl::Span<const TensorSource> tensors, const SafetensorsOptions& options)
      : tensors_(tensors), options_(options) {}

  absl::StatusOr<SavePlan> Plan(const std::string& file_name) {
    HOLDFAST_RETURN_IF_ERROR(Examine(file_name));
    SavePlan plan;
    Segment& literal = plan.files.emplace_back().segments.emplace_back();
    HOLDFAST_RETURN_IF_ERROR(WriteHeader(&literal.literal, &literal.literal));
    literal.bytes = literal.literal.size();
    Assemble(file_name, &plan);
    return plan;
  }

  absl::StatusOr<SafetensorsStructure> Pack(const std::string& file_name) {
    HOLDFAST_RETURN_IF_ERROR(Examine(file_name));
    SafetensorsStructure structure;
    PackedPlan& plan = structure.plan;
    plan.literals.resize(2);
    HOLDFAST_RETURN_IF_ERROR(WriteHeader(&plan.literals[0], &plan.literals[1]));
    PackedFile& file = plan.files.emplace_back();
    file.name = file_name;
    file.runs = {
        {.literal = 0}, {.literal = 1}, {.tensor_count = static_cast<uint32_t>(tensors_.size())}};
    plan.tensors.Reserve(tensors_.size(), text_bytes_, dimensions_);
    uint64_t begin = plan.literals[0].size() + plan.literals[1].size();
    for (const uint32_t index : order_) {
      const TensorSource& source = tensors_[index];
      plan.tensors.Add(source.name, source.dtype, source.shape, 0, begin, begin + source.bytes);
      begin += source.bytes;
    }
    file.bytes = begin;
    CountPacked(&plan);
    structure.order = std::move(order_);
    return structure;
  }

 private:
  absl::Status Examine(const std::string& file_name) {
    const char* const wrong = WrongNewFileName(file_name);
    if (wrong != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan safetensors: file ", Quoted(file_name), ": ", wrong));
    }
    HOLDFAST_RETURN_IF_ERROR(ExamineAll());
    return CheckMetadata();
  }

  absl::Status ExamineAll() {
    if (tensors_.size() > 0xfffffffe) {
      return absl::InvalidArgumentError("plan safetensors: more than 2^32 - 2 tensors");
    }
    items_.reserve(tensors_.size());
    for (const TensorSource& tensor : tensors_) {
      HOLDFAST_RETURN_IF_ERROR(ExamineOne(tensor));
      // Header and rounding keep their room below the largest file offset.
      if (__builtin_add_overflow(data_bytes_, tensor.bytes, &data_bytes_) ||
          data_bytes_ > uint64_t{std::numeric_limits<int64_t>::max()} - (uint64_t{1} << 30)) {
        return WrongSource(tensor, "the file would have more than 2^63 - 1 bytes");
      }
    }
    const TensorSource* const twice = NameCheck(tensors_).FindDuplicate();
    if (twice != nullptr) return WrongSource(*twice, "the name occurs twice");
    Order();
    return absl::OkStatus();
  }

  absl::Status ExamineOne(const TensorSource& tensor) {
    if (tensor.name.empty()) return WrongSource(tensor, "the name is empty");
    if (tensor.name == kMetadataName) return WrongSource(tensor, "the name is the format's own");
    if (!IsUtf8(tensor.name)) return WrongSource(tensor, "the name is not UTF-8");
    // Most tensors have the dtype of the previous tensor.
    if (dtype_ == nullptr || tensor.dtype != dtype_->name) dtype_ = FindDtype(tensor.dtype);
    if (dtype_ == nullptr && !IsUtf8(tensor.dtype)) {
      return WrongSource(tensor, "the dtype is not UTF-8");
    }
    if (tensor.data == nullptr && tensor.bytes != 0) return WrongSource(tensor, "it has no data");
    const absl::StatusOr<uint64_t> elements = ElementCount(tensor.shape);
    if (!elements.ok()) return WrongSource(tensor, elements.status().message());
    uint64_t element_bytes = 0;
    if (dtype_ != nullptr) {
      const absl::StatusOr<uint64_t> bytes = TensorBytes(*dtype_, *elements);
      if (!bytes.ok()) return WrongSource(tensor, bytes.status().message());
      if (*bytes != tensor.bytes) {
        return WrongSource(
            tensor, absl::StrCat(tensor.bytes, " bytes given, shape and dtype make ", *bytes));
      }
      element_bytes = std::max(1u, dtype_->bits / 8);
    } else if (*elements != 0 && tensor.bytes % *elements == 0) {
      element_bytes = tensor.bytes / *elements;
    }
    Item& item = items_.emplace_back();
    item.native = dtype_ != nullptr && dtype_->native;
    if (element_bytes != 0) {
      item.level = static_cast<uint8_t>(std::min(kLevels - 1, std::countr_zero(element_bytes)));
    }
    text_bytes_ += tensor.name.size() + tensor.dtype.size();
    dimensions_ += tensor.shape.size();
    return absl::OkStatus();
  }

  /// Sorts by descending powers of two, so that the bytes before a tensor are a multiple of its
  /// alignment. Tensors of one power keep the given order.
  void Order() {
    size_t counts[kLevels] = {};
    for (const Item& item : items_) ++counts[item.level];
    size_t next[kLevels];
    size_t at = 0;
    for (int level = kLevels - 1; level >= 0; --level) {
      next[level] = at;
      at += counts[level];
    }
    order_.resize(items_.size());
    for (uint32_t i = 0; i < items_.size(); ++i) order_[next[items_[i].level]++] = i;
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
    for (const uint32_t index : order_) {
      if (items_[index].native) continue;
      const TensorSource& tensor = tensors_[index];
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

  /// `head` ends behind the options' metadata.
  void AppendMetadata(std::string* head, std::string* rest) const {
    const std::string dtypes = TrueDtypes();
    if (options_.metadata.empty() && dtypes.empty()) return;
    AppendJsonString(kMetadataName, head);
    head->append(":{");
    bool first = true;
    const auto append = [&](absl::string_view key, absl::string_view value, std::string* json) {
      if (!first) json->push_back(',');
      first = false;
      AppendJsonString(key, json);
      json->push_back(':');
      AppendJsonString(value, json);
    };
    for (const auto& [key, value] : options_.metadata) append(key, value, head);
    if (!dtypes.empty()) append(kDtypesKey, dtypes, rest);
    rest->push_back('}');
  }

  /// Writes the file's first bytes: the length, the JSON, and blanks up to the alignment of direct
  /// I/O. So direct I/O can read and write the data of the first tensor. `head` and `rest` are
  /// empty, and may be the same.
  absl::Status WriteHeader(std::string* head, std::string* rest) const {
    rest->reserve(2 * kIoAlignment + text_bytes_ + kDigitsMax * dimensions_ +
                  kEntryBytes * tensors_.size());
    head->append(8, '\0');
    head->push_back('{');
    AppendMetadata(head, rest);
    bool first = head->size() == 9;
    uint64_t begin = 0;
    for (const uint32_t index : order_) {
      if (!first) rest->push_back(',');
      first = false;
      AppendEntry(index, begin, rest);
      begin += tensors_[index].bytes;
    }
    rest->push_back('}');
    const auto size = [&] { return rest->size() + (rest == head ? 0 : head->size()); };
    rest->append((kIoAlignment - size() % kIoAlignment) % kIoAlignment, ' ');
    const uint64_t length = size() - 8;
    if (length > kSafetensorsHeaderMax) {
      return absl::InvalidArgumentError(absl::StrCat("plan safetensors: a header of ", length,
                                                     " bytes is over the format's limit of ",
                                                     kSafetensorsHeaderMax));
    }
    for (size_t i = 0; i < 8; ++i) (*head)[i] = static_cast<char>(length >> (8 * i) & 0xff);
    return absl::OkStatus();
  }

  void AppendEntry(uint32_t index, uint64_t begin, std::string* json) const {
    const TensorSource& tensor = tensors_[index];
    AppendJsonString(tensor.name, json);
    // One growth of the string instead of ten.
    const size_t at = json->size();
    json->resize(at + kEntryBytes + tensor.dtype.size() + kDigitsMax * tensor.shape.size());
    TextWriter entry(json->data() + at);
    entry.Add(":{\"dtype\":\"");
    if (items_[index].native) {
      entry.Add(tensor.dtype);
      entry.Add("\",\"shape\":");
      entry.AddShape(tensor.shape);
    } else {
      entry.Add("U8\",\"shape\":[");
      entry.AddNumber(tensor.bytes);
      entry.Add("]");
    }
    entry.Add(",\"data_offsets\":[");
    entry.AddNumber(begin);
    entry.Add(",");
    entry.AddNumber(begin + tensor.bytes);
    entry.Add("]}");
    json->resize(static_cast<size_t>(entry.at() - json->data()));
  }

  /// Adds the tensors and their segments to `plan`, which has the header already.
  void Assemble(const std::string& file_name, SavePlan* plan) const {
    PlannedFile& file = plan->files.front();
    file.name = file_name;
    file.segments.reserve(1 + tensors_.size());
    plan->tensors.reserve(tensors_.size());
    uint64_t begin = file.segments.front().bytes;
    for (const uint32_t index : order_) {
      const TensorSource& source = tensors_[index];
      PlannedTensor& tensor = plan->tensors.emplace_back();
      tensor.name = source.name;
      tensor.dtype = source.dtype;
      tensor.shape = source.shape;
      tensor.begin = begin;
      tensor.end = begin + source.bytes;
      if (source.bytes != 0) {
        Segment& segment = file.segments.emplace_back();
        segment.file_offset = begin;
        segment.bytes = source.bytes;
        segment.tensor = static_cast<uint32_t>(plan->tensors.size() - 1);
        segment.data = source.data;
        segment.device = source.device;
        segment.stream = source.stream;
      }
      begin = tensor.end;
    }
    file.bytes = begin;
  }

  /// The bytes of a header entry without name, dtype and dimensions: 45 characters at most, and
  /// three numbers.
  static constexpr size_t kEntryBytes = 112;
  static constexpr size_t kDigitsMax = 21;  // with a comma

  absl::Span<const TensorSource> tensors_;
  const SafetensorsOptions& options_;
  std::vector<Item> items_;      // by the given order
  std::vector<uint32_t> order_;  // in the file, of indices into the given tensors
  const Dtype* dtype_ = nullptr;
  size_t text_bytes_ = 0;
  size_t dimensions_ = 0;
  uint64_t data_bytes_ = 0;
};

SafetensorsOptions WithAttempt(SafetensorsOptions options) {
  if (options.attempt == AttemptId()) return options;
  char hex[kAttemptDigits];
  digest::ToHex(options.attempt, hex);
  options.metadata.emplace_back(kAttemptKey, std::string(hex, sizeof(hex)));
  return options;
}

bool SameTensor(const TensorTable& table, size_t i, const TensorSource& tensor) {
  return tensor.bytes == table.end(i) - table.begin(i) && tensor.name == table.name(i) &&
         tensor.dtype == table.dtype(i) && absl::MakeConstSpan(tensor.shape) == table.shape(i) &&
         (tensor.data != nullptr || tensor.bytes == 0);
}

}  // namespace

absl::StatusOr<SafetensorsStructure> PackSafetensors(const std::string& file_name,
                                                     absl::Span<const TensorSource> tensors) {
  const SafetensorsOptions options = WithAttempt({.metadata = {}, .attempt = {1, 1}});
  return Planner(tensors, options).Pack(file_name);
}

bool SafetensorsStructure::Describes(const std::string& file_name,
                                     absl::Span<const TensorSource> tensors) const {
  if (plan.files[0].name != file_name || order.size() != tensors.size()) return false;
  for (size_t i = 0; i < order.size(); ++i) {
    if (!SameTensor(plan.tensors, i, tensors[order[i]])) return false;
  }
  return true;
}

std::string SafetensorsStructure::HeadFor(const AttemptId& attempt) const {
  std::string head = plan.literals[0];
  digest::ToHex(attempt, head.data() + head.size() - 1 - kAttemptDigits);
  return head;
}

}  // namespace format

absl::StatusOr<SavePlan> PlanSafetensors(const std::string& file_name,
                                         absl::Span<const TensorSource> tensors,
                                         const SafetensorsOptions& options) {
  return format::Planner(tensors, format::WithAttempt(options)).Plan(file_name);
}

}  // namespace holdfast
