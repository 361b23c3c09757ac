// The targets that a save may replace: nothing, an empty directory, or one checkpoint without
// foreign entries.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_REPLACEMENT_H_
#define HOLDFAST_RUNTIME_DIRECTORY_REPLACEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

struct Wanted {
  bool replace = false;
  /// Rank 0; the other ranks do not read the content of a replaced directory.
  bool decides = true;
};

/// Checks that a save may take the name `name` below `parent`. The worker checks again at its
/// commit.
/// \error kAlreadyExists without `replace` when anything but an empty directory has the name;
/// kFailedPrecondition for a file, a symbolic link, or a directory with a foreign entry.
absl::Status CheckTarget(int parent, const std::string& name, const Wanted& wanted);

/// The error of a removal that found the foreign `entry` in the directory `name`.
absl::Status RefuseForeign(const std::string& name, const char* entry);

/// Takes the lock under which saves replace the checkpoint in the open `directory` called `name`.
/// Where the file system has no locks the result holds none.
/// \error kFailedPrecondition for a checkpoint with a foreign entry, naming the entry, or without
/// the manifests of all ranks; kAborted when a save holds the lock.
absl::StatusOr<base::UniqueFd> LockRemovable(int directory, const std::string& name);

/// Returns the attempts that a save of `name` may replace: the committed attempt of that name, and
/// the attempts under way. Called once the save has its own partial directory: then of two saves
/// only the later one lists the other.
absl::StatusOr<std::vector<AttemptId>> OlderAttempts(int parent, const std::string& name);

/// Completes a replacement that a crash ended. Gives `name` to the complete directory `partial`,
/// whose save may replace the attempts `replaces`, and retires the directory under `name`. Durable
/// with the next fsync of `parent`.
/// \error kAlreadyExists when another attempt or entry has the name; kFailedPrecondition for a
/// foreign entry; kUnavailable when a running save is replacing the directory.
absl::Status FinishReplace(int parent, const std::string& partial, const std::string& name,
                           const std::vector<AttemptId>& replaces);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_REPLACEMENT_H_
