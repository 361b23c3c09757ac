// The end of a save whose worker could not report the end: read from the save's directory.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_UNREPORTED_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_UNREPORTED_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/writer/save_state.h"

namespace holdfast::checkpointer {

/// Returns the save's outcome. A worker killed after the commit could not report the commit: the
/// directory has the final name then.
absl::Status Unreported(const SaveState& save, const absl::Status& outcome, bool reported);

/// Without an exchange of directories, a worker killed in a replacement leaves the name free and
/// its own directory complete. A recovery promotes the directory.
bool IsBetweenTwoRenames(const SaveState& save);

/// Returns the names that the checkpoint replaced by a committed save may have.
std::vector<std::string> ReplacedNames(const SaveState& save, bool reported);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_UNREPORTED_H_
