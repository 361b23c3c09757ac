// Is this directory a complete checkpoint? From manifests and sizes alone; no file is read but the
// manifests.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_INSPECT_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_INSPECT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "holdfast/recovery.h"

namespace holdfast::checkpointer {

/// What a directory holds, whatever its own name is.
struct Inspection {
  enum class State {
    kComplete,
    kIncomplete,  ///< Manifests or files are missing, or sizes differ: never was committed.
    kDamaged,     ///< A manifest does not parse, or manifests contradict each other.
    kUnreadable,  ///< An error of the machine (EIO, EMFILE, ...): nothing is known.
  };
  State state = State::kIncomplete;
  absl::Status reason;        ///< Why it is not complete; OK if it is.
  bool has_manifest = false;  ///< At least one file has a rank manifest's name.
  CheckpointInfo info;        ///< Without `name` and `path`. Filled for kComplete.
  std::string recorded_name;  ///< The final name that its manifests carry. Filled for kComplete.
};

Inspection Inspect(int directory);

/// Complete checkpoints below an open directory, as ListCheckpoints. Adds "NAME: why" to
/// `incomplete`, if not null, for directories that have manifests but are no complete checkpoint.
absl::StatusOr<std::vector<CheckpointInfo>> ListComplete(int directory, const std::string& path,
                                                         std::vector<std::string>* incomplete);

/// Whether a file's name is that of some rank's manifest.
bool IsManifestName(absl::string_view name);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_INSPECT_H_
