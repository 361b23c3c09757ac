// The rank manifest: the record of one rank's files, as JSON for people and jq.
//
// The trainer builds a template with fixed-width slots; sealers and the worker fill the slots in
// place. Described byte by byte in runtime/layout/FORMAT.md.
#ifndef HOLDFAST_RUNTIME_FORMAT_MANIFEST_H_
#define HOLDFAST_RUNTIME_FORMAT_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "holdfast/version.h"
#include "runtime/format/file_names.h"
#include "runtime/format/packed_plan.h"
#include "runtime/layout/job.h"

namespace holdfast::format {

/// The newest version: a commit record belongs to the checkpoint. Manifests without a record
/// (single files, adopted files) are of version 3 with replicated files, and of version 2
/// otherwise. Version 1, without `saved_at_ns` and `files_bytes`, is read as well.
inline constexpr uint32_t kManifestVersion = 4;

/// The input of the template, beside the plan.
struct ManifestInput {
  std::string checkpoint;  ///< The final directory name.
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint64_t saved_at_ns = 0;         ///< The save's call, in nanoseconds since 1970.
  std::vector<AttemptId> replaces;  ///< The attempts that the save may replace; rank 0 only.
  Launcher launcher = Launcher::kSpawn;
  PageRung pages = PageRung::kSmall;
  bool read_back = false;
  bool adopted = false;   ///< Made from files on disk, not by a save: see Manifest::adopted.
  bool recorded = false;  ///< A commit record belongs to the save.
  AttemptId parent = {};  ///< As the commit record's; rank 0 only.
  std::string writer = absl::StrCat("holdfast ", Version());
};

/// The places of the sealers' digests of a tensor's own parts. A tensor that begins or ends inside
/// a shared chunk has a digest of that part: `head` up to the first chunk border (or the tensor's
/// end), `tail` from the last chunk border. Chunks in between are the tensor's own. 0 is "no such
/// part". tensor_parts.h computes the ranges.
struct TensorSlots {
  uint64_t head = 0;
  uint64_t tail = 0;
};

struct ManifestTemplate {
  /// As long as the final file. Slots are blank, digests '-': ParseManifest refuses the text until
  /// all are filled (layout/manifest_slots.h).
  std::string text;
  layout::ManifestSlots slots;
  std::vector<uint64_t> file_roots;  ///< By file: place of the root's 32 hex digits.
  std::vector<std::vector<uint64_t>> chunk_digests;  ///< By file and chunk: place of 32 hex digits.
  std::vector<TensorSlots> tensors;                  ///< By tensor.
};

/// Builds the template. The plan is valid (ValidatePlan); its segments are not read.
ManifestTemplate BuildManifest(const ManifestInput& input, const SavePlan& plan);

/// The length of a manifest and the places in it, known before writing.
struct ManifestPlaces {
  uint64_t bytes = 0;
  layout::ManifestSlots slots;
  std::vector<uint64_t> file_roots;  ///< By file: place of the root's 32 hex digits.
  /// By file: place of the first chunk's 32 hex digits. The digits of chunk k stand k *
  /// kChunkStride behind.
  std::vector<uint64_t> chunk_digests;
};
inline constexpr uint64_t kChunkStride = 36;

/// Computes the places in a time that does not grow with the number of tensors, inside the caller's
/// stall.
ManifestPlaces MeasureManifest(const ManifestInput& input, const PackedPlan& plan);

/// Length of the array `tensors`; PackedPlan::manifest_tensor_bytes keeps it.
uint64_t ManifestTensorBytes(const PackedPlan& plan);

/// The digests for a manifest during writing.
class ManifestDigests {
 public:
  virtual ~ManifestDigests() = default;
  virtual Digest OfChunk(uint32_t file, uint64_t chunk) = 0;
  /// The digest of the part of a tensor that begins at byte `begin` of its file. Called in the
  /// order of the tensors.
  virtual Digest OfPart(uint32_t tensor, uint64_t begin) = 0;
};

/// Writes a manifest of MeasureManifest's length, without the roots and the worker's fields.
/// Returns the length.
uint64_t WriteManifest(const ManifestInput& input, const PackedPlan& plan, ManifestDigests* digests,
                       char* text);

/// A parsed manifest.
struct Manifest {
  struct File {
    std::string name;
    uint64_t bytes = 0;
    uint32_t chunk_bytes = kChunkBytes;
    bool replicated = false;  ///< Rank 0 has written the file, and all ranks had these bytes.
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
  /// Of the files that the rank has written, together; version 1 lacks it.
  std::optional<uint64_t> files_bytes;
  std::optional<Digest> replicas;   ///< Digest of the replicated files; equal on all ranks.
  std::vector<AttemptId> replaces;  ///< As ManifestInput's; likewise `parent`.
  AttemptId parent;
  std::string writer;  ///< The program and its version; empty where the manifest names none.
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
  /// Written by --adopt: digests are of the bytes on disk at that time, not of a seal.
  bool adopted = false;
  std::vector<File> files;
  std::vector<Tensor> tensors;

  /// Returns true when the save has made a commit record, or a recovery in the save's place.
  bool Recorded() const { return version >= 4; }
  /// Returns true when this rank has written the file, and not only compared its own bytes.
  bool Wrote(const File& file) const { return !file.replicated || rank == 0; }
};

/// Reads and checks a manifest, in this order:
/// - the self-digest over the raw bytes;
/// - strict JSON: no unknown or duplicate key, nothing after the end;
/// - the meaning: names of one component, ranges inside files, no overlap, chunk counts that match
///   sizes, roots that match chunks, heads and tails at their places.
/// Allocates at most a small multiple of `text`. \error kDataLoss with place (byte or key) and
/// cause.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text);

/// Largest manifest that is read, in bytes.
inline constexpr uint64_t kManifestBytesMax = uint64_t{1} << 30;

/// Checks the length of a manifest that is to be written.
/// \error kInvalidArgument above kManifestBytesMax: no reader would take it.
absl::Status CheckManifestBytes(uint64_t bytes);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_MANIFEST_H_
