// Writing a rank manifest's template.
//
// Text is appended straight to one string, without a JSON library: this runs inside the training
// loop's stall, and every place that is filled later must be known to the byte.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "runtime/digest/digest.h"
#include "runtime/format/manifest.h"
#include "runtime/format/tensor_parts.h"
#include "runtime/format/text.h"
#include "runtime/layout/manifest_slots.h"

namespace holdfast::format {
namespace {

class TemplateWriter {
 public:
  TemplateWriter(const ManifestInput& input, const SavePlan& plan, ManifestTemplate* out)
      : input_(input), plan_(plan), out_(*out), text_(out->text) {}

  void Write() {
    text_.reserve(BytesExpected());
    WriteHead();
    WriteFiles();
    WriteTensors();
    // Readers find the self-digest from the file's end, so it is the last field, followed by
    // exactly these three bytes.
    Add(",\n\"self_digest\":");
    out_.slots.self_digest = {AddDigest(), layout::kDigestSlotBytes};
    Add("}\n");
  }

 private:
  // Names with escapes can be longer; then the string grows once or twice more.
  size_t BytesExpected() const {
    size_t bytes = 2048 + input_.checkpoint.size();
    for (const PlannedFile& file : plan_.files) {
      bytes += 256 + file.name.size() + 36 * ChunkCount(file.bytes);
    }
    for (const PlannedTensor& tensor : plan_.tensors) {
      bytes += 224 + tensor.name.size() + tensor.dtype.size() + 21 * tensor.shape.size();
    }
    return bytes;
  }

  void WriteReplaces() {
    const char* before = ",\n\"replaces\":[\"";
    for (const AttemptId& attempt : input_.replaces) {
      char digits[32];
      digest::ToHex(attempt, digits);
      Add(std::exchange(before, "\",\""));
      text_.append(digits, sizeof(digits));
    }
    if (!input_.replaces.empty()) Add("\"]");
  }

  void WriteHead() {
    char attempt[32];
    digest::ToHex(input_.attempt, attempt);
    Add("{\"format\":\"holdfast.manifest\",\"version\":");
    AppendNumber(kManifestVersion, &text_);
    // The attempt comes first: rank 0 looks for it in the first bytes, and a name has any length.
    Add(",\n\"attempt\":\"");
    text_.append(attempt, sizeof(attempt));
    Add("\",\"checkpoint\":");
    AddString(input_.checkpoint);
    Add(",\n\"rank\":");
    AppendNumber(input_.rank, &text_);
    Add(",\"world_size\":");
    AppendNumber(input_.world_size, &text_);
    Add(",\"step\":");
    AppendNumber(input_.step, &text_);
    Add(",\"saved_at_ns\":");
    AppendNumber(input_.saved_at_ns, &text_);
    uint64_t bytes = 0;
    for (const PlannedFile& file : plan_.files) bytes += file.bytes;
    Add(",\"files_bytes\":");
    AppendNumber(bytes, &text_);
    WriteReplaces();
    Add(",\n\"launcher\":");
    AddString(input_.adopted ? absl::string_view("none") : WordOf(input_.launcher));
    Add(",\"pages\":");
    AddString(input_.adopted ? absl::string_view("none") : layout::ManifestWord(input_.pages));
    Add(",\"streamed\":");
    out_.slots.streamed = AddBlank(layout::kBoolSlotBytes);
    Add(",\"read_back\":");
    AddBool(input_.read_back);
    Add(",\"adopted\":");
    AddBool(input_.adopted);
    Add(",\n\"engine\":");
    out_.slots.engine = AddBlank(layout::kEngineSlotBytes);
    Add(",\"direct_io\":");
    out_.slots.direct_io = AddBlank(layout::kDirectIoSlotBytes);
    Add(",\n\"engine_reason\":");
    out_.slots.engine_reason = AddBlank(layout::kReasonSlotBytes);
    Add(",\n\"bytes_written\":");
    out_.slots.bytes_written = AddBlank(layout::kNumberSlotBytes);
    Add(",\"time_writing_ns\":");
    out_.slots.time_writing_ns = AddBlank(layout::kNumberSlotBytes);
    Add(",\n\"time_syncing_ns\":");
    out_.slots.time_syncing_ns = AddBlank(layout::kNumberSlotBytes);
    Add(",\"time_total_ns\":");
    out_.slots.time_total_ns = AddBlank(layout::kNumberSlotBytes);
  }

  void WriteFiles() {
    Add(",\n\"files\":[");
    out_.file_roots.reserve(plan_.files.size());
    out_.chunk_digests.reserve(plan_.files.size());
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      const PlannedFile& file = plan_.files[i];
      Add(i == 0 ? "\n{\"name\":" : ",\n{\"name\":");
      AddString(file.name);
      Add(",\"bytes\":");
      AppendNumber(file.bytes, &text_);
      Add(",\"chunk_bytes\":");
      AppendNumber(kChunkBytes, &text_);
      Add(",\"root\":");
      out_.file_roots.push_back(AddDigest());
      Add(",\"digests\":[");
      const uint64_t chunks = ChunkCount(file.bytes);
      std::vector<uint64_t>& places = out_.chunk_digests.emplace_back();
      places.reserve(chunks);
      for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
        Add(chunk == 0 ? "\n" : ",\n");
        places.push_back(AddDigest());
      }
      Add("]}");
    }
    Add("]");
  }

  void WriteTensors() {
    Add(",\n\"tensors\":[");
    out_.tensors.reserve(plan_.tensors.size());
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      const PlannedTensor& tensor = plan_.tensors[i];
      Add(i == 0 ? "\n{\"name\":" : ",\n{\"name\":");
      AddString(tensor.name);
      Add(",\"dtype\":");
      AddString(tensor.dtype);
      Add(",\"shape\":");
      AppendShape(tensor.shape, &text_);
      Add(",\"file\":");
      AppendNumber(tensor.file, &text_);
      Add(",\"begin\":");
      AppendNumber(tensor.begin, &text_);
      Add(",\"end\":");
      AppendNumber(tensor.end, &text_);
      const TensorParts parts = PartsOf(tensor.begin, tensor.end, plan_.files[tensor.file].bytes);
      TensorSlots& places = out_.tensors.emplace_back();
      if (parts.has_head) {
        Add(",\"head\":");
        places.head = AddDigest();
      }
      if (parts.has_tail) {
        Add(",\"tail\":");
        places.tail = AddDigest();
      }
      Add("}");
    }
    Add("]");
  }

  void Add(absl::string_view text) { text_.append(text.data(), text.size()); }
  void AddBool(bool value) { Add(value ? "true" : "false"); }
  void AddString(absl::string_view text) { AppendJsonString(text, &text_); }

  /// A place that the worker fills; blank until then, which is not JSON.
  layout::Slot AddBlank(uint32_t width) {
    const layout::Slot slot = {text_.size(), width};
    text_.append(width, ' ');
    return slot;
  }

  /// A place for 32 hex digits, within its quotes; returns where the first of them goes.
  uint64_t AddDigest() {
    static constexpr char kEmpty[] = "\"--------------------------------\"";
    static_assert(sizeof(kEmpty) - 1 == layout::kDigestSlotBytes + 2);
    static_assert(kEmpty[1] == layout::kNoDigest);
    const uint64_t place = text_.size() + 1;
    text_.append(kEmpty, sizeof(kEmpty) - 1);
    return place;
  }

  const ManifestInput& input_;
  const SavePlan& plan_;
  ManifestTemplate& out_;
  std::string& text_;
};

}  // namespace

ManifestTemplate BuildManifest(const ManifestInput& input, const SavePlan& plan) {
  ManifestTemplate out;
  TemplateWriter(input, plan, &out).Write();
  return out;
}

}  // namespace holdfast::format
