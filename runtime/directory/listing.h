// The checkpoints of a directory, the oldest first.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_LISTING_H_
#define HOLDFAST_RUNTIME_DIRECTORY_LISTING_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/recovery.h"

namespace holdfast::directory {

/// The content of a directory of checkpoints.
struct Listing {
  std::vector<CheckpointInfo> complete;  ///< The oldest first.
  /// "NAME: why" for unreadable directories, and for incomplete directories with manifests.
  std::vector<std::string> passed_over;
  absl::Status unreadable;  ///< The first unreadable directory with manifests.
};

/// Returns the names of directories that may be checkpoints (`committed`), or else the names that
/// saves, recoveries and removals use before and after.
absl::StatusOr<std::vector<std::string>> ListDirectories(int directory, const std::string& path,
                                                         bool committed);

/// What a list takes for proof of a complete checkpoint.
enum class Proof {
  kRecord,  ///< The commit record: one small read. Files may have gone since the commit.
  kFiles,   ///< All manifests, and the sizes of their files.
};

/// Lists an open directory. An unreadable entry is passed over; the other entries are listed.
/// \error of this process (no descriptor, no memory), because every entry may be affected.
absl::StatusOr<Listing> ListComplete(int directory, const std::string& path, Proof proof);

/// What the commit records of a directory's checkpoints say.
struct Recorded {
  std::map<std::string, CheckpointInfo> newest;  ///< By series; without their paths.
  uint64_t latest_ns = 0;  ///< The latest time of a save, also in frameworks' directories.
};

/// Reads the commit records alone. Unreadable ones are passed over.
Recorded ReadRecorded(int directory);

/// Order of checkpoints: by the time of their saves; equal times by step, then by name.
bool OlderThan(const CheckpointInfo& a, const CheckpointInfo& b);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_LISTING_H_
