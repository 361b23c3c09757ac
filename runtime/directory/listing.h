// Which checkpoints a directory has, the oldest first.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_LISTING_H_
#define HOLDFAST_RUNTIME_DIRECTORY_LISTING_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/recovery.h"

namespace holdfast::directory {

/// What stands below a directory of checkpoints.
struct Listing {
  std::vector<CheckpointInfo> complete;  ///< The oldest first.
  /// "NAME: why" for directories that cannot be read, or have manifests and are not complete.
  std::vector<std::string> passed_over;
  absl::Status unreadable;  ///< The first one with manifests that cannot be read.
};

/// Lists an open directory. One entry that cannot be read is passed over, the others are listed.
/// \error of this process (no descriptor, no memory): every entry may have met it.
absl::StatusOr<Listing> ListComplete(int directory, const std::string& path);

/// The attempt of the newest checkpoint that has a commit record; none: zero.
AttemptId NewestAttempt(int directory);

/// Order of checkpoints: by the time of their saves; equal times by step, then by name.
bool OlderThan(const CheckpointInfo& a, const CheckpointInfo& b);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_LISTING_H_
