// Announces or abandons a rank's part in a save of several ranks, before Checkpointer::SaveAsync.
#ifndef HOLDFAST_RANKS_H_
#define HOLDFAST_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "holdfast/pod.h"

namespace holdfast {

/// A rank and its save.
struct RankInSave {
  std::string directory;  ///< Parent of the checkpoint, as CheckpointerOptions::directory.
  std::string name;       ///< As SaveRequest::name.
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  absl::Duration time_liveness_max = absl::Seconds(30);  ///< As in CheckpointerOptions.
};

/// Announces the begin of this rank's part to the other ranks of a save, during the object's
/// lifetime.
///
/// SaveAsync announces the rank by itself. A long step before SaveAsync, such as making the first
/// Checkpointer, needs this object: the other ranks' wait for an unannounced rank ends after
/// `time_liveness_max`.
///
/// \forksafety In a child of the creating process the object does nothing.
class RankAnnouncement {
 public:
  /// \error kAborted when another rank has failed already, naming the rank and its reason;
  /// kInvalidArgument (name), kNotFound (directory), and errors of making a file in the directory.
  static absl::StatusOr<std::unique_ptr<RankAnnouncement>> Make(const RankInSave& who);
  ~RankAnnouncement();
  RankAnnouncement(const RankAnnouncement&) = delete;
  RankAnnouncement& operator=(const RankAnnouncement&) = delete;

  /// Withdraws this rank: the other ranks' saves end at once with kAborted and `why`. Not to be
  /// called after SaveAsync has returned a handle; that save reports its own end.
  void Abandon(const absl::Status& why);

  /// Compares the signs of life of some ranks with those that earlier calls have seen. For a wait
  /// between ranks before SaveAsync, about once a second.
  /// \error kDeadlineExceeded naming the ranks that have given no sign for `time_liveness_max`
  /// since the first call, dead or hanging; kAborted when a rank has failed, with its reason.
  absl::Status CheckRanks(absl::Span<const uint32_t> ranks);

  class Impl;

 private:
  explicit RankAnnouncement(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Announces and abandons in one call, for a rank that fails before SaveAsync. A SaveAsync that
/// refuses a save abandons by itself. The last rank to fail removes the partial directory with the
/// board; if ranks are missing, Recover removes both.
absl::Status AbandonSave(const RankInSave& who, const absl::Status& why);

/// XXH3-128 of `bytes` at `data`, for ranks that find out which tensors they have alike
/// (PlannedFile::replicated).
Digest DigestOf(const void* data, uint64_t bytes);

}  // namespace holdfast

#endif  // HOLDFAST_RANKS_H_
