// The rank manifest: the record of what one rank wrote, as JSON that people and jq can read.
//
// Built by the trainer as a template with fixed-width slots; sealers and the worker fill the slots
// in place. Described byte by byte in runtime/layout/FORMAT.md.
#ifndef HOLDFAST_RUNTIME_FORMAT_MANIFEST_H_
#define HOLDFAST_RUNTIME_FORMAT_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "runtime/format/file_names.h"
#include "runtime/format/packed_plan.h"
#include "runtime/layout/job.h"

namespace holdfast::format {

/// The version that is written. Version 1, without `saved_at_ns` and `files_bytes`, is read as
/// well.
inline constexpr uint32_t kManifestVersion = 2;

/// What the template is made from, beside the plan.
struct ManifestInput {
  std::string checkpoint;  ///< Its final directory name.
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint64_t saved_at_ns = 0;         ///< The save's call, in nanoseconds since 1970.
  std::vector<AttemptId> replaces;  ///< What the save may take the place of: rank 0's alone.
  Launcher launcher = Launcher::kSpawn;
  PageRung pages = PageRung::kSmall;
  bool read_back = false;
  bool adopted = false;  ///< Made from files on disk, not by a save: see Manifest::adopted.
};

/// Where the sealers' digests of a tensor's own parts go. A tensor that begins or ends inside a
/// chunk that it shares has a digest of that part: `head` up to the first chunk border (or its
/// end), `tail` from the last chunk border. Chunks in between are its own. 0 is "no such part".
/// tensor_parts.h computes the ranges.
struct TensorSlots {
  uint64_t head = 0;
  uint64_t tail = 0;
};

struct ManifestTemplate {
  std::string text;  ///< As long as the file will be. Its slots are blank, its digests '-': until
                     ///< all are filled (layout/manifest_slots.h), ParseManifest refuses it.
  layout::ManifestSlots slots;
  std::vector<uint64_t> file_roots;  ///< By file: place of the root's 32 hex digits.
  std::vector<std::vector<uint64_t>> chunk_digests;  ///< By file and chunk: place of 32 hex digits.
  std::vector<TensorSlots> tensors;                  ///< By tensor.
};

/// Builds the template. The plan is valid (ValidatePlan); its segments are not looked at.
ManifestTemplate BuildManifest(const ManifestInput& input, const SavePlan& plan);

/// Length of a manifest and the places in it, known before it is written.
struct ManifestPlaces {
  uint64_t bytes = 0;
  layout::ManifestSlots slots;
  std::vector<uint64_t> file_roots;  ///< By file: place of the root's 32 hex digits.
  /// By file: place of the first chunk's 32 hex digits. Those of chunk k stand k * kChunkStride
  /// behind it.
  std::vector<uint64_t> chunk_digests;
};
inline constexpr uint64_t kChunkStride = 36;

/// Takes a time that does not grow with the number of tensors: it is inside the caller's stall.
ManifestPlaces MeasureManifest(const ManifestInput& input, const PackedPlan& plan);

/// Length of the array `tensors`; PackedPlan::manifest_tensor_bytes keeps it.
uint64_t ManifestTensorBytes(const PackedPlan& plan);

/// The digests that go into a manifest while it is written.
class ManifestDigests {
 public:
  virtual ~ManifestDigests() = default;
  virtual Digest OfChunk(uint32_t file, uint64_t chunk) = 0;
  /// Of the part of a tensor that begins at byte `begin` of its file. In the order of the tensors.
  virtual Digest OfPart(uint32_t tensor, uint64_t begin) = 0;
};

/// Writes a manifest of MeasureManifest's length with all but the roots and the worker's fields.
/// Returns its length.
uint64_t WriteManifest(const ManifestInput& input, const PackedPlan& plan, ManifestDigests* digests,
                       char* text);

/// A manifest that was read.
struct Manifest {
  struct File {
    std::string name;
    uint64_t bytes = 0;
    uint32_t chunk_bytes = kChunkBytes;
    std::vector<Digest> chunks;
    Digest root;
  };
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
    uint32_t file = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    bool has_head = false;
    bool has_tail = false;
    Digest head;
    Digest tail;
  };
  uint32_t version = kManifestVersion;
  std::string checkpoint;
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  std::optional<uint64_t> saved_at_ns;  ///< As ManifestInput's; version 1 lacks it.
  std::optional<uint64_t> files_bytes;  ///< Of all its files; version 1 lacks it.
  std::vector<AttemptId> replaces;      ///< As ManifestInput's.
  std::string launcher;
  std::string pages;
  bool streamed = false;
  bool read_back = false;
  std::string engine;
  std::string engine_reason;
  std::string direct_io;
  uint64_t bytes_written = 0;
  uint64_t time_writing_ns = 0;
  uint64_t time_syncing_ns = 0;
  uint64_t time_total_ns = 0;
  /// Written by --adopt: digests are of what was on disk then, not of a seal.
  bool adopted = false;
  std::vector<File> files;
  std::vector<Tensor> tensors;
};

/// Reads and checks a manifest: the self-digest over the raw bytes first, then strict JSON (no
/// unknown or duplicate key, nothing after the end), then meaning: names of one component, ranges
/// inside files, no overlap, chunk counts that match sizes, roots that match chunks, heads and
/// tails where their place asks for them.
/// Allocates no more than a small multiple of `text`. \error kDataLoss saying where (byte or key)
/// and why.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text);

/// Largest manifest that is read, in bytes.
inline constexpr uint64_t kManifestBytesMax = uint64_t{1} << 30;

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_MANIFEST_H_
