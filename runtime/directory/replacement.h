// What a save may take the place of: nothing, an empty directory, or one checkpoint and nothing
// else.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_REPLACEMENT_H_
#define HOLDFAST_RUNTIME_DIRECTORY_REPLACEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/pod.h"

namespace holdfast::directory {

struct Wanted {
  bool replace = false;
  bool decides = true;  ///< Rank 0; the others do not read what a replaced directory holds.
};

/// Whether a save may take the name `name` below `parent`. The worker looks again when it commits.
/// \error kAlreadyExists without `replace` when anything but an empty directory stands there;
/// kFailedPrecondition when it is a file, a symbolic link, or holds an entry of others.
absl::Status CheckTarget(int parent, const std::string& name, const Wanted& wanted);

/// The answer to a removal that found `entry` of others in the directory `name`.
absl::Status RefuseForeign(const std::string& name, const char* entry);

/// Refuses the removal of a directory that once was a checkpoint and holds an entry of others.
/// `directory` is open, `name` its name. \error kFailedPrecondition, naming the entry.
absl::Status CheckRemovable(int directory, const std::string& name);

/// The attempts that a save of `name` may replace: the one that stands under the name, and those
/// that are under way. To be called once the save has its own partial directory: of two saves the
/// one that began later has the other on its list, and not the other way round.
absl::StatusOr<std::vector<AttemptId>> OlderAttempts(int parent, const std::string& name);

/// Finishes what a crash ended: gives `name` to the complete directory `partial`, whose save may
/// replace the attempts `replaces`, and retires what stands there. Durable with the next fsync of
/// `parent`. \error kAlreadyExists when something else stands there; kFailedPrecondition when it
/// holds an entry of others; kUnavailable when a running save is replacing it.
absl::Status FinishReplace(int parent, const std::string& partial, const std::string& name,
                           const std::vector<AttemptId>& replaces);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_REPLACEMENT_H_
