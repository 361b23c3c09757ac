// Checks of the caller's arguments, before any resource is taken.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_OPTIONS_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_OPTIONS_H_

#include <string>

#include "absl/status/status.h"
#include "holdfast/checkpointer.h"

namespace holdfast::checkpointer {

/// Checks a checkpoint's name: one path component, short enough for the suffix of a partial
/// directory, and no name with a meaning for recovery.
absl::Status ValidateName(const std::string& name);

/// Returns `options` with those of `core` that all front doors to one arena share.
CheckpointerOptions WithShared(CheckpointerOptions options, const CheckpointerOptions& core);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_OPTIONS_H_
