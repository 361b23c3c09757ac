// Making the kernel provide pages now, on several threads, with an error instead of a signal when
// it cannot.
#ifndef HOLDFAST_RUNTIME_STAGING_PREFAULT_H_
#define HOLDFAST_RUNTIME_STAGING_PREFAULT_H_

#include <cstdint>

#include "absl/status/status.h"

namespace holdfast::staging {

/// A shared, writable mapping of `fd` from its offset 0 on.
struct MappedFile {
  char* base = nullptr;
  int fd = -1;
  uint64_t bytes = 0;
};

/// The first `touch_bytes` of every `stride_bytes` of the file.
struct PrefaultPattern {
  uint64_t stride_bytes = 0;
  uint64_t touch_bytes = 0;
  uint32_t threads = 1;
};

/// Nobody else writes the memory meanwhile. \error kResourceExhausted when there are no pages left;
/// some may have been taken by then.
absl::Status Prefault(const MappedFile& file, const PrefaultPattern& pattern);

/// All of it. A page that is there already costs next to nothing.
absl::Status PrefaultAll(const MappedFile& file, uint32_t threads);

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_PREFAULT_H_
