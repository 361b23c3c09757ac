// Writes a rank manifest.
//
// The writer puts text directly into memory, without a JSON library. The place of every later field
// must be known to the byte. A save with many tensors writes hundreds of megabytes.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "runtime/digest/digest.h"
#include "runtime/format/manifest.h"
#include "runtime/format/self_digest.h"
#include "runtime/format/tensor_parts.h"
#include "runtime/format/text.h"
#include "runtime/layout/manifest_slots.h"

namespace holdfast::format {
namespace {

constexpr uint32_t kVersionWithReplicas = 3;
constexpr uint32_t kVersionWithoutReplicas = 2;
constexpr char kNoDigits[] = "--------------------------------";
static_assert(sizeof(kNoDigits) - 1 == layout::kDigestSlotBytes);
static_assert(kNoDigits[0] == layout::kNoDigest);
// Two quotes, a comma and a line feed stand between the digits of two chunks.
static_assert(kChunkStride == layout::kDigestSlotBytes + 4);

/// The text except its digests. `Sink` is a TextCounter or a TextWriter.
template <typename Sink>
class Text {
 public:
  Text(const ManifestInput& input, const PackedPlan& plan, Sink* sink)
      : input_(input), plan_(plan), sink_(*sink) {}

  /// `blank(slot, width)` adds a slot of blanks, `digits(slot)` a slot of a digest.
  template <typename Blank, typename Digits>
  void Head(const Blank& blank, const Digits& digits) {
    char attempt[layout::kDigestSlotBytes];
    digest::ToHex(input_.attempt, attempt);
    Add("{\"format\":\"holdfast.manifest\",\"version\":");
    sink_.AddNumber(input_.recorded        ? kManifestVersion
                    : plan_.has_replicas() ? kVersionWithReplicas
                                           : kVersionWithoutReplicas);
    // The attempt and the replicas come first: rank 0 searches for them in the first bytes, and a
    // name has any length.
    Add(",\n\"attempt\":\"");
    Add({attempt, sizeof(attempt)});
    if (plan_.has_replicas()) {
      Add("\",\"replicas\":\"");
      digits(&layout::ManifestSlots::replicas);
    }
    Add("\",\"checkpoint\":");
    sink_.AddJsonString(input_.checkpoint);
    Add(",\n\"rank\":");
    sink_.AddNumber(input_.rank);
    Add(",\"world_size\":");
    sink_.AddNumber(input_.world_size);
    Add(",\"step\":");
    sink_.AddNumber(input_.step);
    Add(",\"saved_at_ns\":");
    sink_.AddNumber(input_.saved_at_ns);
    Add(",\"files_bytes\":");
    sink_.AddNumber(plan_.WrittenBytes(input_.rank));
    if (input_.parent != AttemptId{}) Ids(",\n\"parent\":\"", {input_.parent}, "\"");
    Ids(",\n\"replaces\":[\"", input_.replaces, "\"]");
    Add(",\n\"writer\":");
    sink_.AddJsonString(input_.writer);
    Add(",\"launcher\":");
    sink_.AddJsonString(input_.adopted ? absl::string_view("none") : WordOf(input_.launcher));
    Add(",\"pages\":");
    sink_.AddJsonString(input_.adopted ? absl::string_view("none")
                                       : layout::ManifestWord(input_.pages));
    Add(",\"streamed\":");
    blank(&layout::ManifestSlots::streamed, layout::kBoolSlotBytes);
    Add(",\"read_back\":");
    Add(input_.read_back ? "true" : "false");
    Add(",\"adopted\":");
    Add(input_.adopted ? "true" : "false");
    Add(",\n\"engine\":");
    blank(&layout::ManifestSlots::engine, layout::kEngineSlotBytes);
    Add(",\"direct_io\":");
    blank(&layout::ManifestSlots::direct_io, layout::kDirectIoSlotBytes);
    Add(",\n\"engine_reason\":");
    blank(&layout::ManifestSlots::engine_reason, layout::kReasonSlotBytes);
    Add(",\n\"bytes_written\":");
    blank(&layout::ManifestSlots::bytes_written, layout::kNumberSlotBytes);
    Add(",\"time_writing_ns\":");
    blank(&layout::ManifestSlots::time_writing_ns, layout::kNumberSlotBytes);
    Add(",\n\"time_syncing_ns\":");
    blank(&layout::ManifestSlots::time_syncing_ns, layout::kNumberSlotBytes);
    Add(",\"time_total_ns\":");
    blank(&layout::ManifestSlots::time_total_ns, layout::kNumberSlotBytes);
  }

  /// `root(file)` adds the digits of a file's root. `chunks(file)` adds the digits of all its
  /// chunks, with the separators.
  template <typename Root, typename Chunks>
  void Files(const Root& root, const Chunks& chunks) {
    Add(",\n\"files\":[");
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      const PackedFile& file = plan_.files[i];
      Add(i == 0 ? "\n{\"name\":" : ",\n{\"name\":");
      sink_.AddJsonString(file.name);
      Add(",\"bytes\":");
      sink_.AddNumber(file.bytes);
      Add(",\"chunk_bytes\":");
      sink_.AddNumber(kChunkBytes);
      if (file.replicated) Add(",\"replicated\":true");
      Add(",\"root\":\"");
      root(i);
      Add("\",\"digests\":[");
      if (file.bytes != 0) {
        Add("\n\"");
        chunks(i);
        Add("\"");
      }
      Add("]}");
    }
    Add("]");
  }

  /// `part(tensor, begin, is_head)` adds the digits of a part.
  template <typename Part>
  void Tensors(const Part& part) {
    const TensorTable& tensors = plan_.tensors;
    Add(",\n\"tensors\":[");
    for (size_t i = 0; i < tensors.size(); ++i) {
      Add(i == 0 ? "\n{\"name\":" : ",\n{\"name\":");
      sink_.AddJsonString(tensors.name(i));
      Add(",\"dtype\":");
      sink_.AddJsonString(tensors.dtype(i));
      Add(",\"shape\":");
      sink_.AddShape(tensors.shape(i));
      Add(",\"file\":");
      sink_.AddNumber(tensors.file(i));
      Add(",\"begin\":");
      sink_.AddNumber(tensors.begin(i));
      Add(",\"end\":");
      sink_.AddNumber(tensors.end(i));
      const TensorParts parts =
          PartsOf(tensors.begin(i), tensors.end(i), plan_.files[tensors.file(i)].bytes);
      if (parts.has_head) {
        Add(",\"head\":\"");
        part(i, tensors.begin(i), true);
        Add("\"");
      }
      if (parts.has_tail) {
        Add(",\"tail\":\"");
        part(i, parts.tail_begin, false);
        Add("\"");
      }
      Add("}");
    }
    Add("]");
  }

 private:
  void Ids(absl::string_view before, absl::Span<const AttemptId> ids, absl::string_view behind) {
    for (const AttemptId& id : ids) {
      char digits[layout::kDigestSlotBytes];
      digest::ToHex(id, digits);
      Add(std::exchange(before, "\",\""));
      Add({digits, sizeof(digits)});
    }
    if (!ids.empty()) Add(behind);
  }

  void Add(absl::string_view text) { sink_.Add(text); }

  const ManifestInput& input_;
  const PackedPlan& plan_;
  Sink& sink_;
};

void AddDigits(const Digest& digest, TextWriter* out) {
  char digits[layout::kDigestSlotBytes];
  digest::ToHex(digest, digits);
  out->Add({digits, sizeof(digits)});
}

/// A whole manifest. `chunk(file, chunk)` and `part(tensor, begin, is_head)` add digits.
template <typename Chunk, typename Part>
void WriteAll(const ManifestInput& input, const PackedPlan& plan, TextWriter* out,
              const Chunk& chunk, const Part& part) {
  Text<TextWriter> text(input, plan, out);
  text.Head(
      [out](layout::Slot layout::ManifestSlots::*, uint32_t width) {
        // Blank until the worker fills the slot; blanks are not JSON.
        out->AddBlanks(width);
      },
      [out](layout::Slot layout::ManifestSlots::*) { out->Add(kNoDigits); });
  text.Files([out](size_t) { out->Add(kNoDigits); },
             [&](size_t file) {
               const uint64_t count = ChunkCount(plan.files[file].bytes);
               for (uint64_t k = 0; k < count; ++k) {
                 if (k != 0) out->Add("\",\n\"");
                 chunk(file, k);
               }
             });
  text.Tensors(part);
  out->Add(",\n");
  out->Add(kSelfDigestKey);
  out->Add(kNoDigits);
  out->Add(kSelfDigestEnd);
}

}  // namespace

uint64_t ManifestTensorBytes(const PackedPlan& plan) {
  TextCounter counter;
  const ManifestInput none;
  Text<TextCounter>(none, plan, &counter).Tensors([&counter](size_t, uint64_t, bool) {
    counter.AddBlanks(layout::kDigestSlotBytes);
  });
  return counter.bytes();
}

ManifestPlaces MeasureManifest(const ManifestInput& input, const PackedPlan& plan) {
  ManifestPlaces places;
  TextCounter counter;
  Text<TextCounter> text(input, plan, &counter);
  const auto take = [&](layout::Slot layout::ManifestSlots::*slot, uint32_t width) {
    places.slots.*slot = {.offset = counter.bytes(), .width = width};
    counter.AddBlanks(width);
  };
  text.Head(take, [&take](layout::Slot layout::ManifestSlots::*slot) {
    take(slot, layout::kDigestSlotBytes);
  });
  places.chunk_digests.resize(plan.files.size());
  text.Files(
      [&](size_t) {
        places.file_roots.push_back(counter.bytes());
        counter.AddBlanks(layout::kDigestSlotBytes);
      },
      [&](size_t file) {
        places.chunk_digests[file] = counter.bytes();
        counter.AddBlanks((ChunkCount(plan.files[file].bytes) - 1) * kChunkStride +
                          layout::kDigestSlotBytes);
      });
  counter.AddBlanks(plan.manifest_tensor_bytes);
  counter.Add(",\n");
  counter.Add(kSelfDigestKey);
  places.slots.self_digest = {.offset = counter.bytes(), .width = layout::kDigestSlotBytes};
  places.bytes = counter.bytes() + layout::kDigestSlotBytes + kSelfDigestEnd.size();
  return places;
}

uint64_t WriteManifest(const ManifestInput& input, const PackedPlan& plan, ManifestDigests* digests,
                       char* text) {
  TextWriter out(text);
  WriteAll(
      input, plan, &out,
      [&](size_t file, uint64_t chunk) {
        AddDigits(digests->OfChunk(static_cast<uint32_t>(file), chunk), &out);
      },
      [&](size_t tensor, uint64_t begin, bool) {
        AddDigits(digests->OfPart(static_cast<uint32_t>(tensor), begin), &out);
      });
  return static_cast<uint64_t>(out.at() - text);
}

absl::Status CheckManifestBytes(uint64_t bytes) {
  if (bytes <= kManifestBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the manifest would have ", bytes,
                                                 " bytes, and readers take at most ",
                                                 kManifestBytesMax, "; save less in one rank"));
}

ManifestTemplate BuildManifest(const ManifestInput& input, const SavePlan& plan) {
  const PackedPlan packed = Pack(plan);
  ManifestPlaces places = MeasureManifest(input, packed);
  ManifestTemplate made;
  made.text.resize(places.bytes);
  made.tensors.resize(plan.tensors.size());
  for (size_t i = 0; i < plan.files.size(); ++i) {
    std::vector<uint64_t>& chunks = made.chunk_digests.emplace_back();
    for (uint64_t k = 0; k < ChunkCount(plan.files[i].bytes); ++k) {
      chunks.push_back(places.chunk_digests[i] + k * kChunkStride);
    }
  }
  made.slots = places.slots;
  made.file_roots = std::move(places.file_roots);
  TextWriter out(made.text.data());
  WriteAll(
      input, packed, &out, [&](size_t, uint64_t) { out.Add(kNoDigits); },
      [&](size_t tensor, uint64_t, bool is_head) {
        TensorSlots& slots = made.tensors[tensor];
        (is_head ? slots.head : slots.tail) = static_cast<uint64_t>(out.at() - made.text.data());
        out.Add(kNoDigits);
      });
  return made;
}

}  // namespace holdfast::format
