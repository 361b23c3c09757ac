#include "runtime/base/memfd.h"

#include <sys/mman.h>

#include <cerrno>

#include "runtime/base/status.h"
#include "runtime/sys/owned_fds.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace holdfast::base {

absl::StatusOr<UniqueFd> CreateMemfd(const char* name, const char* what, unsigned flags) {
  flags |= MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // Hardened systems refuse or log a memfd without the seal against execution; kernels before 6.3
  // lack the flag.
  int fd = sys::MemfdOwned(name, flags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = sys::MemfdOwned(name, flags);
  if (fd < 0) return ErrnoStatus("memfd_create", what, errno);
  return UniqueFd(fd);
}

}  // namespace holdfast::base
