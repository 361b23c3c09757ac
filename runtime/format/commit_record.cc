#include "runtime/format/commit_record.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/format/json_reader.h"
#include "runtime/format/self_digest.h"
#include "runtime/format/text.h"
#include "runtime/layout/manifest_slots.h"

namespace holdfast::format {
namespace {

constexpr uint32_t kRecordVersion = 1;

class RecordWriter {
 public:
  explicit RecordWriter(const CommitInput& input) : input_(input) {}

  CommitTemplate Write() {
    WriteHead();
    Add(",\n\"manifests\":");
    for (uint32_t rank = 0; rank < input_.world_size; ++rank) WriteRow(rank);
    // As in a manifest: the last field, before exactly these three bytes (self_digest.h).
    Add("],\n\"self_digest\":");
    out_.slots.self_digest = {AddDigest(), layout::kDigestSlotBytes};
    Add("}\n");
    return std::move(out_);
  }

 private:
  void WriteHead() {
    Add("{\"format\":\"holdfast.commit\",\"version\":");
    AppendNumber(kRecordVersion, &out_.text);
    Add(",\n\"checkpoint\":");
    AppendJsonString(input_.checkpoint, &out_.text);
    Add(",\"series\":");
    AppendJsonString(SeriesOf(input_.checkpoint), &out_.text);
    Add(",\n\"attempt\":");
    AddId(input_.attempt);
    Add(",\"parent\":");
    AddId(input_.parent);
    Add(",\n\"world_size\":");
    AppendNumber(input_.world_size, &out_.text);
    Add(",\"step\":");
    AppendNumber(input_.step, &out_.text);
    Add(",\"saved_at_ns\":");
    AppendNumber(input_.saved_at_ns, &out_.text);
    Add(",\n\"committed_at_ns\":");
    out_.slots.committed_at_ns = AddNumber();
    Add(",\"bytes\":");
    out_.slots.bytes = AddNumber();
    if (!input_.commit_file.has_value()) return;
    Add(",\n\"commit_file\":{\"name\":");
    AppendJsonString(input_.commit_file->name, &out_.text);
    Add(",\"bytes\":");
    AppendNumber(input_.commit_file->bytes, &out_.text);
    Add(",\"digest\":");
    AddId(input_.commit_file->digest);
    Add("}");
  }

  void WriteRow(uint32_t rank) {
    // Rows have one length, so the worker finds a row by the rank's number.
    const uint64_t begin = out_.text.size();
    Add(rank == 0 ? "[\n{\"bytes\":" : ",\n{\"bytes\":");
    const layout::Slot bytes = AddNumber();
    Add(",\"digest\":");
    const uint64_t digest = AddDigest();
    Add("}");
    if (rank != 0) return;
    out_.slots.manifest_bytes = bytes;
    out_.slots.manifest_digest = digest;
    out_.slots.row_bytes = out_.text.size() - begin;
  }

  void Add(absl::string_view text) { out_.text.append(text.data(), text.size()); }
  template <typename Id>
  void AddId(const Id& id) {
    char digits[32];
    digest::ToHex(id, digits);
    AppendJsonString(absl::string_view(digits, sizeof(digits)), &out_.text);
  }
  layout::Slot AddNumber() {
    const layout::Slot slot = {out_.text.size(), layout::kNumberSlotBytes};
    out_.text.append(layout::kNumberSlotBytes, ' ');
    return slot;
  }
  uint64_t AddDigest() {
    Add("\"");
    const uint64_t place = out_.text.size();
    out_.text.append(layout::kDigestSlotBytes, layout::kNoDigest);
    Add("\"");
    return place;
  }

  const CommitInput& input_;
  CommitTemplate out_;
};

absl::Status WrongRecord(absl::string_view where, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("commit record: ", where, ": ", what));
}

class RecordReader {
 public:
  explicit RecordReader(absl::string_view text) : json_(text) {}

  absl::StatusOr<CommitRecord> Read() {
    static constexpr absl::string_view kNames[] = {
        "format",          "version",    "checkpoint",  "series",     "attempt",
        "parent",          "world_size", "step",        "bytes",      "saved_at_ns",
        "committed_at_ns", "manifests",  "self_digest", "commit_file"};
    constexpr uint64_t kOptional = uint64_t{1} << (std::size(kNames) - 1);
    uint64_t seen = 0;
    if (json_.EnterObject()) {
      for (int field; (field = json_.NextField(kNames, kOptional, &seen)) >= 0;) {
        ReadField(kNames[field]);
      }
    }
    json_.AtEnd();
    if (!json_.status().ok()) return base::Annotate(json_.status(), "commit record");
    return std::move(out_);
  }

 private:
  void ReadField(absl::string_view name) {
    if (name == "format") {
      std::string text;
      if (json_.String(&text) && text != "holdfast.commit") json_.Fail("unknown format");
    } else if (name == "version") {
      uint32_t version = 0;
      if (json_.Unsigned32(&version) && version != kRecordVersion) {
        json_.Fail(absl::StrCat("version ", version, ", only ", kRecordVersion, " is known"));
      }
    } else if (name == "checkpoint") {
      json_.String(&out_.checkpoint);
    } else if (name == "series") {
      json_.String(&out_.series);
    } else if (name == "attempt") {
      json_.Hex(&out_.attempt);
    } else if (name == "parent") {
      json_.Hex(&out_.parent);
    } else if (name == "world_size") {
      json_.Unsigned32(&out_.world_size);
    } else if (name == "step") {
      json_.Unsigned(&out_.step);
    } else if (name == "bytes") {
      json_.Unsigned(&out_.bytes);
    } else if (name == "saved_at_ns") {
      json_.Unsigned(&out_.saved_at_ns);
    } else if (name == "committed_at_ns") {
      json_.Unsigned(&out_.committed_at_ns);
    } else if (name == "manifests") {
      if (!json_.EnterArray()) return;
      while (json_.NextElement()) ReadRow();
    } else if (name == "commit_file") {
      ReadCommitFile();
    } else {
      Digest ignored;  // Checked before over the raw bytes.
      json_.Hex(&ignored);
    }
  }

  void ReadRow() {
    static constexpr absl::string_view kNames[] = {"bytes", "digest"};
    CommitRecord::RankManifest& row = out_.manifests.emplace_back();
    uint64_t seen = 0;
    if (!json_.EnterObject()) return;
    for (int field; (field = json_.NextField(kNames, 0, &seen)) >= 0;) {
      field == 0 ? json_.Unsigned(&row.bytes) : json_.Hex(&row.digest);
    }
  }

  void ReadCommitFile() {
    static constexpr absl::string_view kNames[] = {"name", "bytes", "digest"};
    CommitFileDigest& file = out_.commit_file.emplace();
    uint64_t seen = 0;
    if (!json_.EnterObject()) return;
    for (int field; (field = json_.NextField(kNames, 0, &seen)) >= 0;) {
      if (field == 0) {
        json_.String(&file.name);
      } else {
        field == 1 ? json_.Unsigned(&file.bytes) : json_.Hex(&file.digest);
      }
    }
  }

  JsonReader json_;
  CommitRecord out_;
};

}  // namespace

CommitTemplate BuildCommitRecord(const CommitInput& input) { return RecordWriter(input).Write(); }

std::string CompleteCommitRecord(const CommitInput& input, uint64_t committed_at_ns, uint64_t bytes,
                                 absl::Span<const CommitRecord::RankManifest> manifests) {
  CommitTemplate made = BuildCommitRecord(input);
  char* const text = made.text.data();
  const layout::CommitSlots& slots = made.slots;
  layout::FillNumber(text, slots.committed_at_ns, committed_at_ns);
  layout::FillNumber(text, slots.bytes, bytes);
  for (size_t rank = 0; rank < manifests.size(); ++rank) {
    const uint64_t row = rank * slots.row_bytes;
    layout::FillNumber(text, {slots.manifest_bytes.offset + row, slots.manifest_bytes.width},
                       manifests[rank].bytes);
    digest::ToHex(manifests[rank].digest, text + slots.manifest_digest + row);
  }
  digest::ToHex(digest::Of(text, slots.self_digest.offset), text + slots.self_digest.offset);
  return std::move(made.text);
}

absl::StatusOr<CommitRecord> ParseCommitRecord(absl::string_view text) {
  HOLDFAST_RETURN_IF_ERROR(CheckSelfDigest("commit record", text, kCommitRecordBytesMax));
  HOLDFAST_ASSIGN_OR_RETURN(CommitRecord record, RecordReader(text).Read());
  if (record.attempt == AttemptId{}) return WrongRecord("attempt", "no attempt id");
  if (const char* const wrong = WrongComponent(record.checkpoint)) {
    return WrongRecord("checkpoint", wrong);
  }
  if (record.commit_file.has_value()) {
    if (const char* const wrong = WrongDataFileName(record.commit_file->name)) {
      return WrongRecord("commit_file", wrong);
    }
  }
  if (record.world_size == 0 || record.manifests.size() != record.world_size) {
    return WrongRecord("manifests", absl::StrCat(record.manifests.size(), " rows for ",
                                                 record.world_size, " ranks"));
  }
  return record;
}

}  // namespace holdfast::format
