// The file behind the arena, on one rung of the ladder of page sizes.
#ifndef HOLDFAST_RUNTIME_STAGING_PAGE_SOURCE_H_
#define HOLDFAST_RUNTIME_STAGING_PAGE_SOURCE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::staging {

/// The arena in error messages.
constexpr char kArenaObject[] = "staging arena";

struct PageSource {
  base::UniqueFd fd;
  uint64_t bytes = 0;       ///< Size of the file: the request rounded up to a page.
  uint64_t page_bytes = 0;  ///< Largest page of the rung; the kernel may allocate smaller pages.
};

/// "memfd hugetlb", "tmpfs huge=always", ...
const char* NameOf(PageRung rung);

/// Makes an unnamed shared-memory file of `bytes`, close-on-exec, with a sealed size where the rung
/// has seals. `rung` is not kAuto. Allocates no page.
absl::StatusOr<PageSource> OpenPages(PageRung rung, uint64_t bytes);

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_PAGE_SOURCE_H_
