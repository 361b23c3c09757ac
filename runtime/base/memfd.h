// Memory with an fd, to be handed to another process.
#ifndef HOLDFAST_RUNTIME_BASE_MEMFD_H_
#define HOLDFAST_RUNTIME_BASE_MEMFD_H_

#include "absl/status/statusor.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::base {

/// A new file in memory, sealable, not executable, closed by exec. `flags` for memfd_create(2),
/// such as MFD_HUGETLB. \error Its errno; `what` names the object.
absl::StatusOr<UniqueFd> CreateMemfd(const char* name, const char* what, unsigned flags = 0);

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_MEMFD_H_
