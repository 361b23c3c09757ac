// Letting checkpoints go in a way that a crash at any moment leaves either a checkpoint or
// something that recovery removes.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_REMOVAL_H_
#define HOLDFAST_RUNTIME_DIRECTORY_REMOVAL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/recovery.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

/// A checkpoint that has lost its name and waits for its removal.
struct RetiredCheckpoint {
  std::string name;       ///< ".step-7.retired-<its attempt>", for a kDelete job's trash.
  base::UniqueFd in_use;  ///< Locked (flock, LOCK_SH) against a recovery removing it side by side.
};

/// Renames a checkpoint to its retired name and makes that durable. One atomic step: from then on
/// no reader takes it for a checkpoint, and a crash during the slow removal leaves no nameless ruin
/// but a directory that Recover removes. \error kNotFound;
/// kAborted when a save has replaced it meanwhile: the new one stays; errors of rename and fsync.
absl::StatusOr<RetiredCheckpoint> RetireCheckpoint(int parent, const CheckpointInfo& checkpoint);

/// Removes a directory of files as the worker does: durably, large files in steps. What is gone
/// already is no error, so that it can be repeated after a crash at any point, and run by two at
/// once. \error kFailedPrecondition, naming the entry, when it holds one of others.
absl::Status RemoveDirectory(int parent, const std::string& name);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_REMOVAL_H_
