// Recovery of files that are saved by themselves (SaveRequest::single_file).
#ifndef HOLDFAST_RUNTIME_RECOVERY_SINGLE_FILES_H_
#define HOLDFAST_RUNTIME_RECOVERY_SINGLE_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "holdfast/recovery.h"
#include "runtime/directory/file_system.h"

namespace holdfast::recovery {

/// Waits until no save has one of the files locked that are unfinished now, at most until
/// `deadline`. A killed process's ring may hold the lock for a moment. The caller does not hold the
/// directory's lock, which a save needs for its end. \error when the directory cannot be listed.
absl::Status AwaitSingleFiles(int parent, const std::string& path, absl::Time deadline);

/// Renames complete files of dead saves to their final names. Removes further leftovers of dead
/// saves and manifests without a file. The caller holds the directory's lock. \error when the
/// directory cannot be listed or synced.
absl::Status SettleSingleFiles(int parent, const std::string& path,
                               const directory::FileSystem& file_system,
                               const RecoveryOptions& options, RecoveryReport* report);

}  // namespace holdfast::recovery

#endif  // HOLDFAST_RUNTIME_RECOVERY_SINGLE_FILES_H_
