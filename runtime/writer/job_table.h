// The trainer's side of the job table: lays out the control memory of one save and fills it from a
// plan.
#ifndef HOLDFAST_RUNTIME_WRITER_JOB_TABLE_H_
#define HOLDFAST_RUNTIME_WRITER_JOB_TABLE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/device.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"
#include "runtime/format/packed_plan.h"
#include "runtime/layout/job.h"
#include "runtime/writer/completion.h"

namespace holdfast::writer {

/// Values of a job table beside the plan; see the fields of the same names in layout::Job.
struct JobParameters {
  layout::JobKind kind = layout::JobKind::kSave;
  uint32_t flags = 0;
  Launcher launcher = Launcher::kSpawn;
  EngineRung engine = EngineRung::kAuto;
  uint32_t queue_depth = 8;
  uint32_t pwrite_threads = 2;
  /// From the start; a save that runs out of memory starts streaming by itself.
  bool streams = false;
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  std::string target;
  std::string partial;
  std::vector<AttemptId> older;
  Qos qos;
  uint64_t time_stalled_max_ns = 0;
  uint64_t time_ranks_max_ns = 0;
  uint64_t time_liveness_max_ns = 0;
};

/// Copies the options that reach the worker unchanged, between structs that name them alike: the
/// Checkpointer's options, JobParameters, layout::Job.
template <typename From, typename To>
void CopyWorkerOptions(const From& from, To* to) {
  to->launcher = from.launcher;
  to->engine = from.engine;
  to->queue_depth = from.queue_depth;
  to->pwrite_threads = from.pwrite_threads;
  to->rank = from.rank;
  to->world_size = from.world_size;
  to->qos = from.qos;
}

/// The source of a tensor's bytes. Never leaves the trainer.
struct PieceSource {
  const char* data = nullptr;
  Device* device = nullptr;  ///< Null: host memory.
};

/// A part of a tensor or of a literal inside one extent; the trainer's own of a layout::Piece.
struct StagedPiece {
  const char* data = nullptr;
  Device* device = nullptr;             ///< Null: host memory.
  uint32_t tensor = Failure::kNoIndex;  ///< kNoIndex: a literal.
  uint32_t offset = 0;                  ///< Within the extent.
  uint32_t bytes = 0;
  bool has_digest = false;
};

/// The sources of one save's bytes; parallel to the plan's tensors and literals.
struct Sources {
  std::vector<PieceSource> tensors;
  std::vector<const char*> literals;  ///< Must outlive the table.
};

/// The contents of a save's table.
struct SaveContents {
  std::shared_ptr<const format::PackedPlan> plan;
  Sources sources;
  format::ManifestInput manifest;
  format::CommitTemplate commit;
};

/// One control mapping (a memfd, DONTFORK here, sealed against resizing) with the trainer's private
/// data.
///
/// The worker can write to every byte of the mapping. The trainer therefore keeps a copy of each
/// offset, index and length of its own making, and never reads these back. Only ReadResult and
/// WrongState read the worker's values, with checks.
class JobTable {
 public:
  /// Takes as much control memory as ControlBytes says.
  static absl::StatusOr<std::unique_ptr<JobTable>> ForSave(const JobParameters& parameters,
                                                           const SaveContents& contents);
  /// Makes a job that removes retired checkpoint directories.
  static absl::StatusOr<std::unique_ptr<JobTable>> ForDelete(const JobParameters& parameters,
                                                             const std::vector<std::string>& names);
  ~JobTable();
  JobTable(const JobTable&) = delete;
  JobTable& operator=(const JobTable&) = delete;

  layout::Job* job() const { return job_; }
  const JobParameters& parameters() const { return parameters_; }
  uint32_t extent_count() const { return static_cast<uint32_t>(extents_.size()); }
  const layout::Extent& extent(uint32_t index) const { return extents_[index]; }
  const StagedPiece* pieces(const layout::Extent& extent) const {
    return pieces_.data() + extent.piece_first;
  }
  /// The place of the digest of the extent's piece `index`.
  Digest* digest_of(const layout::Extent& extent, uint32_t index) const {
    return &shared_pieces_[extent.piece_first + index].digest;
  }
  void SetArenaOffset(uint32_t index, uint64_t offset) {
    extents_[index].arena_offset = shared_extents_[index].arena_offset = offset;
  }
  void SetSealed(uint32_t index, const Digest& digest) { shared_extents_[index].sealed = digest; }
  int fd() const { return fd_.get(); }
  uint64_t bytes() const { return bytes_; }
  /// Writes the manifest except the worker's slots. Called once, after every extent was sealed and
  /// before the last extent is published. A table without extents has its manifest already.
  void WriteManifest();
  /// Returns the worker's result once it is there. \error As ReadCompletion.
  absl::StatusOr<std::optional<Completion>> ReadResult() const {
    return ReadCompletion(*job_, limits_);
  }

 private:
  JobTable() = default;
  static absl::StatusOr<std::unique_ptr<JobTable>> Map(uint64_t bytes);
  void FillCommon(const JobParameters& parameters);
  void FillFiles(const Sources& sources, const format::ManifestPlaces& places);
  class Filler;
  class SealedDigests;

  base::ForkGuard guard_;
  base::UniqueFd fd_;
  layout::Job* job_ = nullptr;
  uint64_t bytes_ = 0;
  JobParameters parameters_;
  CompletionLimits limits_;
  layout::Extent* shared_extents_ = nullptr;
  layout::Piece* shared_pieces_ = nullptr;
  char* shared_manifest_ = nullptr;
  uint64_t manifest_bytes_ = 0;
  std::vector<uint32_t> extent_first_;  // by file
  std::vector<layout::Extent> extents_;
  std::vector<StagedPiece> pieces_;
  std::shared_ptr<const format::PackedPlan> plan_;
  format::ManifestInput manifest_;
};

/// How many bytes of control memory such a save takes.
/// \error kInvalidArgument for a manifest that no reader would take.
absl::StatusOr<uint64_t> ControlBytes(const SaveContents& contents, uint64_t older_count);

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_JOB_TABLE_H_
