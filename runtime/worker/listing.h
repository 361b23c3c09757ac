// Iteration over a directory's entries without the C library's stream, which allocates from the
// heap.
#ifndef HOLDFAST_RUNTIME_WORKER_LISTING_H_
#define HOLDFAST_RUNTIME_WORKER_LISTING_H_

#include <fcntl.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/job_run.h"

namespace holdfast::worker {

/// The kernel's record (getdents64(2)), unnamed in the C library.
struct ListedEntry {
  uint64_t inode;
  int64_t next;
  uint16_t bytes;
  uint8_t type;
  char name[1];
};

/// Calls `visit(name)` for every entry but "." and "..", until it returns false. `buffer` has
/// kDirectoryBufferBytes. Returns 0 or an errno.
template <typename Visit>
int ForEachEntry(int directory, char* buffer, Visit&& visit) {
  // A separate open file description: the offset of `directory` may be shared.
  const int fd = sys::OpenOwned(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return errno;
  int error = 0;
  for (bool more = true; more;) {
    const ssize_t got = sys::Sys().getdents64(fd, buffer, kDirectoryBufferBytes);
    if (got < 0) error = errno;
    if (got <= 0) break;
    for (ssize_t at = 0; more && at < got;) {
      const ListedEntry* const entry = reinterpret_cast<const ListedEntry*>(buffer + at);
      HOLDFAST_ASSERT(entry->bytes > 0 && entry->bytes <= got - at);
      at += entry->bytes;
      if (strcmp(entry->name, ".") == 0 || strcmp(entry->name, "..") == 0) continue;
      more = visit(static_cast<const char*>(entry->name));
    }
  }
  sys::CloseOwned(fd);
  return error;
}

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_LISTING_H_
