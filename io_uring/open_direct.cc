// Opens a file for direct I/O and tests the result.
//
// An open(2) with O_DIRECT proves nothing: btrfs with checksums, tmpfs and FUSE accept the flag and
// use the page cache. Real direct I/O refuses a misaligned write, and statx(2) reports its
// alignment.
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "io_uring/queue.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

int OpenAt(int directory, const char* name, int flags, uint32_t mode) {
  // open(2) can be interrupted on some network file systems.
  return sys::Uninterrupted(
      [&] { return sys::OpenOwned(directory, name, flags | O_CLOEXEC, mode); });
}

// Opens again after a file system refused O_DIRECT with EINVAL. The kernel refuses only after
// creating the file, so a file of an O_EXCL call exists now; reuse the file if unchanged.
int OpenBuffered(int directory, const char* name, int flags, uint32_t mode, int* out) {
  const bool exclusive = (flags & O_EXCL) != 0 && (flags & O_CREAT) != 0;
  *out = OpenAt(directory, name, flags, mode);
  if (*out >= 0) return 0;
  if (errno != EEXIST || !exclusive) return errno;
  *out = OpenAt(directory, name, (flags & ~(O_EXCL | O_CREAT)) | O_NOFOLLOW, 0);
  if (*out < 0) return errno;
  struct stat status = {};
  if (sys::Sys().fstat(*out, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0) {
    return 0;
  }
  sys::CloseOwned(*out);
  *out = -1;
  return EEXIST;
}

// Reads the file system's alignment. Returns false where none is reported.
bool AskAlignment(int fd, DirectOpen* out) {
#ifdef STATX_DIOALIGN
  struct statx status = {};
  if (sys::Sys().statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return false;
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return false;
  out->memory_alignment = status.stx_dio_mem_align;
  out->offset_alignment = status.stx_dio_offset_align;
  return true;
#else
  (void)fd;
  (void)out;
  return false;
#endif
}

bool ForWriting(int flags) {
  const int access = flags & O_ACCMODE;
  return access == O_WRONLY || access == O_RDWR;
}

enum class Probe { kRefused, kAccepted, kNotPossible };

// Tries a write with misaligned memory, length and offset. Returns 0, or an errno if the write was
// accepted and could not be undone.
int ProbeMisaligned(int fd, Probe* result) {
  *result = Probe::kNotPossible;
  struct stat status = {};
  if (sys::Sys().fstat(fd, &status) != 0) return 0;
  if (!S_ISREG(status.st_mode) || status.st_size != 0) return 0;
  alignas(kIoAlignment) static constexpr unsigned char kBytes[128] = {};
  const ssize_t written =
      sys::Uninterrupted([&] { return sys::Sys().pwrite(fd, kBytes + 1, 100, 1); });
  if (written < 0) {
    // Another error (no space, a quota) also fails the real writes, with a report.
    if (errno == EINVAL) *result = Probe::kRefused;
    return 0;
  }
  *result = Probe::kAccepted;
  return sys::Sys().ftruncate(fd, 0) == 0 ? 0 : errno;
}

// Classifies the O_DIRECT fd in `out`. Returns 0 or an errno.
int Judge(int flags, DirectOpen* out) {
  HOLDFAST_ASSERT(out->fd >= 0 && out->direct == DirectIo::kNo);
  const bool says = AskAlignment(out->fd, out);
  if (says) {
    const uint32_t memory = out->memory_alignment;
    const uint32_t offset = out->offset_alignment;
    // Zero: no direct I/O on this file (encrypted, inline data, data journaling).
    const bool usable =
        memory != 0 && offset != 0 && memory <= kIoAlignment && offset <= kIoAlignment;
    if (!usable) return SwitchOffDirect(out->fd);
    if (!ForWriting(flags)) {
      out->direct = DirectIo::kProven;
      return 0;
    }
  }
  out->direct = DirectIo::kClaimed;
  if (!ForWriting(flags)) return 0;
  Probe probe = Probe::kNotPossible;
  const int error = ProbeMisaligned(out->fd, &probe);
  if (error == 0 && says && probe == Probe::kRefused) out->direct = DirectIo::kProven;
  return error;
}

}  // namespace

int SwitchOffDirect(int fd) {
  const int flags = sys::Sys().fcntl(fd, F_GETFL, 0);
  if (flags < 0) return errno;
  return sys::Sys().fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0 ? 0 : errno;
}

int OpenDirect(int directory, const char* name, int flags, uint32_t mode, bool want_direct,
               DirectOpen* out) {
  *out = DirectOpen{};
  flags &= ~O_DIRECT;
  if (want_direct) out->fd = OpenAt(directory, name, flags | O_DIRECT, mode);
  if (out->fd < 0) {
    if (want_direct && errno != EINVAL && errno != EOPNOTSUPP) return errno;
    if (want_direct) return OpenBuffered(directory, name, flags, mode, &out->fd);
    out->fd = OpenAt(directory, name, flags, mode);
    return out->fd >= 0 ? 0 : errno;
  }
  HOLDFAST_ASSERT(out->fd >= 0 && (flags & O_DIRECT) == 0);
  const int error = Judge(flags, out);
  if (error != 0) {
    sys::CloseOwned(out->fd);
    *out = DirectOpen{};
  }
  return error;
}

}  // namespace holdfast::io
