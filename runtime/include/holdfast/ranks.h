// A rank's part in a save of several ranks, before and instead of Checkpointer::SaveAsync.
#ifndef HOLDFAST_RANKS_H_
#define HOLDFAST_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/pod.h"

namespace holdfast {

/// Which rank takes part in which save.
struct RankInSave {
  std::string directory;  ///< Above the checkpoint, as CheckpointerOptions::directory.
  std::string name;       ///< As SaveRequest::name.
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  absl::Duration time_liveness_max = absl::Seconds(30);  ///< As in CheckpointerOptions.
};

/// Says to the other ranks of a save that this one has begun it, as long as the object lives.
///
/// SaveAsync does it by itself. What takes long before it, as making the first Checkpointer, would
/// else look like a rank that never comes, which the others wait for no longer than
/// `time_liveness_max`.
///
/// \forksafety In a child of the creating process it does nothing.
class RankAnnouncement {
 public:
  /// \error kAborted when another rank has failed already, naming it and its reason;
  /// kInvalidArgument (name), kNotFound (directory), and what making a file there says.
  static absl::StatusOr<std::unique_ptr<RankAnnouncement>> Make(const RankInSave& who);
  ~RankAnnouncement();
  RankAnnouncement(const RankAnnouncement&) = delete;
  RankAnnouncement& operator=(const RankAnnouncement&) = delete;

  /// This rank takes no part: the other ranks' saves end at once with kAborted and `why`. Not after
  /// SaveAsync has returned a handle, whose save says itself how it ends.
  void Abandon(const absl::Status& why);

  class Impl;

 private:
  explicit RankAnnouncement(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Make and Abandon in one, for a rank that fails before it calls SaveAsync. SaveAsync does it by
/// itself when it refuses a save. The last rank to fail removes the partial directory with the
/// board; if not all ranks come, Recover does.
absl::Status AbandonSave(const RankInSave& who, const absl::Status& why);

}  // namespace holdfast

#endif  // HOLDFAST_RANKS_H_
