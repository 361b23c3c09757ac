// Loads a checkpoint into the final memory of its tensors.
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

/// Destination of a tensor: exactly its recorded number of bytes, or a part of them.
struct TensorTarget {
  std::string name;
  void* data = nullptr;
  uint64_t bytes = 0;
  Device* device = nullptr;  ///< Null is the host.
  /// Load only bytes [begin, begin + bytes) of the tensor. Several targets may name parts of one
  /// tensor.
  std::optional<uint64_t> begin = std::nullopt;
};

struct LoadOptions {
  bool verify = true;  ///< Compare every loaded byte with the digests taken at seal.
  uint64_t buffer_bytes = uint64_t{64} << 20;  ///< Size of the buffer between disk and tensors.
  /// Threads that digest and copy, the caller's included; 0 is one per CPU, at most 4.
  uint32_t threads = 0;
  EngineRung engine = EngineRung::kAuto;
  bool direct_io = true;
};

struct LoadReport {
  uint64_t bytes = 0;       ///< Of the tensors loaded.
  uint64_t bytes_read = 0;  ///< From disk; whole chunks where verified.
  double seconds = 0;
  bool verified = false;
  EngineRung engine = EngineRung::kAuto;
  std::string engine_reason;
  DirectIo direct_io = DirectIo::kNo;
};

/// Reads the checkpoint of one rank, or of several ranks as one, by their manifests. Keeps no file
/// open and no tensor.
class CheckpointReader {
 public:
  /// Opens the checkpoint directory `path` as rank `rank`. Checks the manifest's digests and the
  /// files' sizes. A sound commit record vouches for the other ranks' manifests; without a record,
  /// those manifests and their files' sizes are checked, too.
  /// \error kNotFound, kDataLoss (manifest damaged), kFailedPrecondition (incomplete).
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& path,
                                                                uint32_t rank = 0);

  /// Opens a single safetensors file, with or without a manifest: of its checkpoint, or its own
  /// (SaveRequest::single_file). Without a manifest loads cannot verify bytes, and
  /// LoadReport::verified is false.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenFile(const std::string& path);

  /// Opens the files named by one manifest of the directory `path`, without regard to other ranks.
  /// For directories that a framework owns: the framework's last file tells completeness. `digest`
  /// is the manifest's, from the commit record (CheckCommitFile).
  /// \error as Open.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenManifest(
      const std::string& path, const std::string& manifest_name,
      const std::optional<Digest>& digest = std::nullopt);

  /// Opens files without a manifest at byte places given by the caller. `tensors` refer to `files`
  /// of the directory `path` by index and have distinct names. Loads cannot verify bytes.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenPlaces(
      const std::string& path, std::vector<std::string> files, std::vector<PlannedTensor> tensors);

  ~CheckpointReader();

  /// Adds the tensors of another rank after checking its files. The checkpoint was opened by Open
  /// and belongs to no framework. Of two tensors of one name the added tensor counts. Not beside
  /// other calls of this reader.
  /// \error as Open; the reader is then unchanged.
  absl::Status Add(uint32_t rank);

  const std::vector<PlannedTensor>& tensors() const;
  /// Names of the files, indexed by PlannedTensor::file.
  const std::vector<std::string>& files() const;
  uint64_t step() const;
  uint32_t world_size() const;
  AttemptId attempt() const;

  /// Reads tensors into their targets. Verified loads write only verified bytes to a target; on an
  /// error targets may be partly filled.
  /// \error kNotFound (no such tensor), kInvalidArgument (size), kAborted (another checkpoint has
  /// taken the path since Open), kDataLoss (digest: tensor, file, range), ...
  absl::StatusOr<LoadReport> Load(absl::Span<const TensorTarget> targets,
                                  const LoadOptions& options) const;

  class Impl;

 private:
  explicit CheckpointReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast

#endif  // HOLDFAST_LOAD_H_
