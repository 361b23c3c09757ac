// Checking what callers hand in, before anything is taken or made.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_OPTIONS_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_OPTIONS_H_

#include <string>

#include "absl/status/status.h"
#include "holdfast/checkpointer.h"

namespace holdfast::checkpointer {

/// A checkpoint's name: one path component, short enough for what is appended while it is written,
/// and not one that recovery would take for something else.
absl::Status ValidateName(const std::string& name);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_OPTIONS_H_
