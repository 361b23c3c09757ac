// Allocates pages on several threads and returns an error, not a signal, when pages are short.
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

/// Allocates the pages of `pattern`. No other thread may write the memory meanwhile.
/// \error kResourceExhausted when no pages are left; some pages may be allocated by then.
absl::Status Prefault(const MappedFile& file, const PrefaultPattern& pattern);

/// Allocates all pages of the file. A present page costs next to nothing.
absl::Status PrefaultAll(const MappedFile& file, uint32_t threads);

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_PREFAULT_H_
