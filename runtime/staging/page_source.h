// The file behind the arena, on one rung of the ladder of page sizes.
#ifndef HOLDFAST_RUNTIME_STAGING_PAGE_SOURCE_H_
#define HOLDFAST_RUNTIME_STAGING_PAGE_SOURCE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::staging {

struct PageSource {
  base::UniqueFd fd;
  uint64_t bytes = 0;       ///< Size of the file: what was asked for, rounded up to a page.
  uint64_t page_bytes = 0;  ///< That the rung can give; the kernel may still give smaller ones.
};

/// "memfd hugetlb", "tmpfs huge=always", ...
const char* NameOf(PageRung rung);

/// Makes an unnamed shared-memory file of `bytes`, close-on-exec, sealed against any change of its
/// size where the rung can be sealed. `rung` is not kAuto. No page is taken yet.
absl::StatusOr<PageSource> OpenPages(PageRung rung, uint64_t bytes);

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_PAGE_SOURCE_H_
