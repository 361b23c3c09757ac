// A rank that takes no part in a save tells the others: see AbandonSave.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_ABANDON_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_ABANDON_H_

#include <string>

#include "absl/status/status.h"

namespace holdfast::checkpointer {

/// Leaves layout::kAbortedName in the partial directory, which is made if it is not there. Only for
/// a rank that has not voted and that no worker of serves.
absl::Status LeaveAbortedMark(int parent, const std::string& partial);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_ABANDON_H_
