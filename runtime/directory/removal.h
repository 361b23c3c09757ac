// Removal of checkpoints. A crash at any moment leaves a checkpoint or a directory that recovery
// removes.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_REMOVAL_H_
#define HOLDFAST_RUNTIME_DIRECTORY_REMOVAL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/recovery.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

/// A checkpoint that was renamed for its removal.
struct RetiredCheckpoint {
  std::string name;       ///< ".step-7.retired-<its attempt>", for a kDelete job's trash.
  base::UniqueFd in_use;  ///< Locked (flock, LOCK_SH) against a concurrent removal by a recovery.
};

/// Renames a checkpoint to its retired name and makes the rename durable, in one atomic step.
/// Readers no longer find the checkpoint. After a crash during the slow removal, Recover removes
/// the retired directory.
/// \error kNotFound; kAborted when a save has replaced the checkpoint meanwhile: the new one stays;
/// errors of rename and fsync.
absl::StatusOr<RetiredCheckpoint> RetireCheckpoint(int parent, const CheckpointInfo& checkpoint);

/// Returns true for a directory of a save: an empty one, or one with an entry that only a save
/// makes. A user's own directory may have the name of a partial directory.
bool IsOfASave(int directory);

/// Checks that a recovery may remove the open `directory` called `name`: the directory is that of a
/// save and has no foreign entry that a removal would keep. Changes nothing.
/// \error kFailedPrecondition, with the remedy; errors of reading.
absl::Status CheckRemovable(int directory, const std::string& name);

/// Removes a directory of files as the worker does: durably, large files in steps. Missing entries
/// are no error, so the removal can be repeated after a crash at any point, or run by two processes
/// at once.
/// \error kFailedPrecondition, naming the entry, for a foreign entry.
absl::Status RemoveDirectory(int parent, const std::string& name);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_REMOVAL_H_
