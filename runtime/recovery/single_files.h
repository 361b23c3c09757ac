// Recovery of files that are saved by themselves (SaveRequest::single_file).
#ifndef HOLDFAST_RUNTIME_RECOVERY_SINGLE_FILES_H_
#define HOLDFAST_RUNTIME_RECOVERY_SINGLE_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "holdfast/recovery.h"
#include "runtime/directory/file_system.h"

namespace holdfast::recovery {

/// Renames complete files of dead saves to their final names. Removes further leftovers of dead
/// saves and manifests without a file. The caller holds the directory's lock. \error when the
/// directory cannot be listed or synced.
absl::Status SettleSingleFiles(int parent, const std::string& path,
                               const directory::FileSystem& file_system,
                               const RecoveryOptions& options, RecoveryReport* report);

}  // namespace holdfast::recovery

#endif  // HOLDFAST_RUNTIME_RECOVERY_SINGLE_FILES_H_
