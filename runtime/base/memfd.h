// Memory with an fd, for sharing with another process.
#ifndef HOLDFAST_RUNTIME_BASE_MEMFD_H_
#define HOLDFAST_RUNTIME_BASE_MEMFD_H_

#include "absl/status/statusor.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::base {

/// Makes a sealable, non-executable file in memory, closed by exec. `flags` for memfd_create(2),
/// such as MFD_HUGETLB. `what` names the object in the error.
/// \error The errno of memfd_create(2).
absl::StatusOr<UniqueFd> CreateMemfd(const char* name, const char* what, unsigned flags = 0);

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_MEMFD_H_
