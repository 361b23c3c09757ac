// Parses a safetensors header. Stricter than the reference in one point: duplicate and unknown keys
// are refused, because readers disagree about their meaning.
#include "runtime/format/safetensors.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/format/dtype.h"
#include "runtime/format/json_reader.h"
#include "runtime/format/text.h"

namespace holdfast::format {
namespace {

absl::Status WrongHeader(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("safetensors header: ", what));
}

absl::Status WrongTensor(const PlannedTensor& tensor, absl::string_view what) {
  return WrongHeader(absl::StrCat("tensor ", Quoted(tensor.name), ": ", what));
}

class HeaderReader {
 public:
  explicit HeaderReader(absl::string_view text) : json_(text) {}

  absl::Status Read(SafetensorsHeader* header) {
    ReadTop(header);
    json_.AtEnd();
    // Bytes count from the header's text; the message names the offset of the text in the file.
    return base::Annotate(json_.status(), "safetensors header: after the first 8 bytes");
  }

 private:
  void ReadTop(SafetensorsHeader* header) {
    absl::flat_hash_set<std::string> names;
    std::string name;
    if (!json_.EnterObject()) return;
    while (json_.NextKey(&name)) {
      if (!names.insert(name).second) {
        json_.Fail(absl::StrCat("tensor ", Quoted(name), " a second time"));
      } else if (name == "__metadata__") {
        ReadMetadata(header);
      } else {
        PlannedTensor& tensor = header->tensors.emplace_back();
        tensor.name = std::move(name);
        ReadTensor(&tensor);
      }
    }
  }

  void ReadMetadata(SafetensorsHeader* header) {
    absl::flat_hash_set<std::string> keys;
    std::string key;
    if (!json_.EnterObject()) return;
    while (json_.NextKey(&key)) {
      if (!keys.insert(key).second) {
        json_.Fail(absl::StrCat("metadata ", Quoted(key), " a second time"));
        return;
      }
      auto& entry = header->metadata.emplace_back(std::move(key), "");
      if (!json_.String(&entry.second)) return;
    }
  }

  void ReadTensor(PlannedTensor* tensor) {
    static constexpr absl::string_view kNames[] = {"dtype", "shape", "data_offsets"};
    uint64_t seen = 0;
    if (!json_.EnterObject()) return;
    for (int field; (field = json_.NextField(kNames, 0, &seen)) >= 0;) {
      switch (field) {
        case 0:
          json_.String(&tensor->dtype);
          break;
        case 1:
          json_.Shape(&tensor->shape);
          break;
        default:
          ReadOffsets(tensor);
      }
    }
  }

  void ReadOffsets(PlannedTensor* tensor) {
    if (!json_.EnterArray()) return;
    for (uint64_t* offset : {&tensor->begin, &tensor->end}) {
      if (!json_.NextElement()) {
        json_.Fail("expected two offsets");
        return;
      }
      json_.Unsigned(offset);
    }
    if (json_.NextElement()) json_.Fail("expected two offsets");
  }

  JsonReader json_;
};

absl::Status CheckSize(const PlannedTensor& tensor) {
  const Dtype* const dtype = FindDtype(tensor.dtype);
  if (dtype == nullptr) {
    return absl::UnimplementedError(absl::StrCat("safetensors header: tensor ", Quoted(tensor.name),
                                                 ": dtype ", Quoted(tensor.dtype),
                                                 " is not known, so its size cannot be checked"));
  }
  const absl::StatusOr<uint64_t> elements = ElementCount(tensor.shape);
  if (!elements.ok()) return WrongTensor(tensor, elements.status().message());
  const absl::StatusOr<uint64_t> bytes = TensorBytes(*dtype, *elements);
  if (!bytes.ok()) return WrongTensor(tensor, bytes.status().message());
  if (tensor.end < tensor.begin || tensor.end - tensor.begin != *bytes) {
    return WrongTensor(tensor, absl::StrCat("offsets ", tensor.begin, " to ", tensor.end,
                                            ", shape and dtype make ", *bytes, " bytes"));
  }
  return absl::OkStatus();
}

/// Checks that the tensors, in file order, cover [0, data_bytes) without hole or overlap. Turns
/// their offsets into the file's.
absl::Status Place(uint64_t data_bytes, SafetensorsHeader* header) {
  std::vector<PlannedTensor>& tensors = header->tensors;
  for (const PlannedTensor& tensor : tensors) HOLDFAST_RETURN_IF_ERROR(CheckSize(tensor));
  // Sorted by end, too: an empty tensor precedes the tensor that begins at the same byte.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const PlannedTensor& a, const PlannedTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  uint64_t end = 0;
  for (PlannedTensor& tensor : tensors) {
    if (tensor.begin != end) {
      return WrongTensor(
          tensor, absl::StrCat("begins at ", tensor.begin, ", the data before it ends at ", end,
                               tensor.begin > end ? " (a hole)" : " (an overlap)"));
    }
    end = tensor.end;
    if (end > data_bytes) {
      return WrongTensor(
          tensor, absl::StrCat("ends at ", end, ", the file has ", data_bytes, " bytes of data"));
    }
    tensor.begin += header->data_begin;
    tensor.end += header->data_begin;
  }
  if (end != data_bytes) {
    return WrongHeader(
        absl::StrCat("the tensors end at ", end, ", the file has ", data_bytes, " bytes of data"));
  }
  return absl::OkStatus();
}

/// Restores dtype and shape of tensors that were stored as bytes.
absl::Status RestoreDtypes(absl::string_view text, SafetensorsHeader* header) {
  absl::flat_hash_map<std::string, PlannedTensor*> stored;  // as bytes, not restored yet
  for (PlannedTensor& tensor : header->tensors) {
    if (tensor.dtype == "U8" && tensor.shape.size() == 1) stored.emplace(tensor.name, &tensor);
  }
  static constexpr absl::string_view kNames[] = {"dtype", "shape"};
  JsonReader json(text);
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  if (json.EnterObject()) {
    while (json.NextKey(&name)) {
      const auto found = stored.find(name);
      if (found == stored.end()) {
        json.Fail(absl::StrCat("tensor ", Quoted(name), " is not stored as bytes"));
        break;
      }
      uint64_t seen = 0;
      if (!json.EnterObject()) break;
      for (int field; (field = json.NextField(kNames, 0, &seen)) >= 0;) {
        field == 0 ? json.String(&dtype) : json.Shape(&shape);
      }
      found->second->dtype = std::move(dtype);
      found->second->shape = std::move(shape);
      stored.erase(found);
    }
  }
  json.AtEnd();
  return base::Annotate(json.status(), absl::StrCat("safetensors header: ", kDtypesKey));
}

}  // namespace

absl::StatusOr<uint64_t> HeaderLength(absl::string_view first8, uint64_t file_bytes) {
  if (file_bytes < 8 || first8.size() < 8) {
    return WrongHeader(absl::StrCat("a file of ", file_bytes, " bytes has no room for it"));
  }
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(first8[i]);
  if (length > kSafetensorsHeaderMax) {
    return WrongHeader(absl::StrCat("its length of ", length, " bytes is over the limit of ",
                                    kSafetensorsHeaderMax));
  }
  if (length > file_bytes - 8) {
    return WrongHeader(
        absl::StrCat("its length of ", length, " bytes is over the file's ", file_bytes));
  }
  return length;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensors(absl::string_view prefix, uint64_t file_bytes) {
  HOLDFAST_ASSIGN_OR_RETURN(const uint64_t length, HeaderLength(prefix, file_bytes));
  if (prefix.size() != 8 + length) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors header: ", prefix.size(),
                                                   " bytes were given, it has ", 8 + length));
  }
  const absl::string_view text = prefix.substr(8);
  if (text.empty() || text.front() != '{') return WrongHeader("it does not begin with '{'");
  SafetensorsHeader header;
  header.data_begin = prefix.size();
  HOLDFAST_RETURN_IF_ERROR(HeaderReader(text).Read(&header));
  HOLDFAST_RETURN_IF_ERROR(Place(file_bytes - prefix.size(), &header));
  for (const auto& [key, value] : header.metadata) {
    if (key == kDtypesKey) HOLDFAST_RETURN_IF_ERROR(RestoreDtypes(value, &header));
  }
  return header;
}

}  // namespace holdfast::format
