// Reading a checkpoint back into its tensors' final places.
#ifndef HOLDFAST_LOAD_H_
#define HOLDFAST_LOAD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "holdfast/device.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"

namespace holdfast {

/// Where a tensor goes: exactly its recorded number of bytes, or a part of them.
struct TensorTarget {
  std::string name;
  void* data = nullptr;
  uint64_t bytes = 0;
  Device* device = nullptr;  ///< Null is the host.
  /// Only bytes [begin, begin + bytes) of the tensor. The same tensor may be asked for by parts.
  std::optional<uint64_t> begin = std::nullopt;
};

struct LoadOptions {
  bool verify = true;  ///< Compare every byte that is loaded with the digests of its seal.
  uint64_t buffer_bytes = uint64_t{64} << 20;  ///< Bounded buffer that everything streams through.
  uint32_t threads = 0;  ///< Digesting and copying, the caller's included; 0 is
                         ///< one per CPU, at most 4.
  EngineRung engine = EngineRung::kAuto;
  bool direct_io = true;
};

struct LoadReport {
  uint64_t bytes = 0;       ///< Of the tensors loaded.
  uint64_t bytes_read = 0;  ///< From disk (whole chunks where they are verified).
  double seconds = 0;
  bool verified = false;
  EngineRung engine = EngineRung::kAuto;
  std::string engine_reason;
  DirectIo direct_io = DirectIo::kNo;
};

/// An open checkpoint of one rank, or of several as one: manifests that parsed and name what is
/// there. Holds no file open and no tensor.
class CheckpointReader {
 public:
  /// Opens the checkpoint directory `path`, as rank `rank` of it. The manifest's digests and the
  /// files' sizes are checked. Of the other ranks' manifests a sound commit record vouches; without
  /// one they and their files' sizes are checked, too. \error kNotFound, kDataLoss (manifest
  /// damaged), kFailedPrecondition (incomplete).
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& path,
                                                                uint32_t rank = 0);

  /// Opens a single safetensors file that may have no manifest; then nothing can be verified and
  /// loads say so.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenFile(const std::string& path);

  /// Opens what one manifest of the directory `path` names, whatever became of the other ranks':
  /// for directories that a framework owns, whose own last file says what is complete. `digest`: of
  /// the manifest, as the commit record has it (CheckCommitFile). \error as Open.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenManifest(
      const std::string& path, const std::string& manifest_name,
      const std::optional<Digest>& digest = std::nullopt);

  /// Opens files without any manifest whose inner places the caller knows. `tensors` name the files
  /// of the directory `path` by index and have distinct names; nothing can be verified.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenPlaces(
      const std::string& path, std::vector<std::string> files, std::vector<PlannedTensor> tensors);

  ~CheckpointReader();

  /// Adds the tensors of another rank of a checkpoint that Open has opened, no framework's, and
  /// checks what they need. Of two tensors of one name the added one counts. Not beside other calls
  /// of this reader. \error as Open; then nothing was added.
  absl::Status Add(uint32_t rank);

  const std::vector<PlannedTensor>& tensors() const;
  /// Names of the files, by the index that tensors have.
  const std::vector<std::string>& files() const;
  uint64_t step() const;
  uint32_t world_size() const;
  AttemptId attempt() const;

  /// Reads tensors into their places. Each target is written only with verified bytes of its own;
  /// on an error targets may be partly filled. \error kNotFound (no such tensor), kInvalidArgument
  /// (size), kDataLoss (digest: tensor, file, range), ...
  absl::StatusOr<LoadReport> Load(absl::Span<const TensorTarget> targets,
                                  const LoadOptions& options) const;

  class Impl;

 private:
  explicit CheckpointReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast

#endif  // HOLDFAST_LOAD_H_
