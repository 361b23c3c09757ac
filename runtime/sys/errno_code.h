// Maps an errno to a failure code, for both sides of the fork line.
#ifndef HOLDFAST_RUNTIME_SYS_ERRNO_CODE_H_
#define HOLDFAST_RUNTIME_SYS_ERRNO_CODE_H_

#include <cerrno>

#include "holdfast/pod.h"

namespace holdfast::sys {

/// True for the errnos of renameat2(2) on a file system without the flag: NFS, some FUSE.
constexpr bool LacksRenameFlag(int error_number) {
  return error_number == EINVAL || error_number == ENOSYS || error_number == EOPNOTSUPP;
}

constexpr FailureCode CodeOfErrno(int error_number) {
  switch (error_number) {
    case 0:
      return FailureCode::kOk;
    case ENOENT:
    case ENODEV:
    case ENXIO:
      return FailureCode::kNotFound;
    case EEXIST:
    case ENOTEMPTY:
      return FailureCode::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return FailureCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case ENOLCK:
    // A page that the file behind a mapping cannot give.
    case EFAULT:
      return FailureCode::kResourceExhausted;
    case EINVAL:
    case ENAMETOOLONG:
    case ELOOP:
      return FailureCode::kInvalidArgument;
    case ENOTDIR:
    case EISDIR:
    case EXDEV:
    case EBADF:
      return FailureCode::kFailedPrecondition;
    case ETIMEDOUT:
    case ETIME:
      return FailureCode::kDeadlineExceeded;
    case EOPNOTSUPP:
    case ENOSYS:
      return FailureCode::kUnimplemented;
    case EAGAIN:
    // Of the kernel's own, and not by a user's request.
    case ECANCELED:
    case EBUSY:
    case EINTR:
    case EPIPE:
    case ECONNRESET:
    // A FUSE file system without a server.
    case ECONNABORTED:
    case ENOTCONN:
    case ESTALE:
      return FailureCode::kUnavailable;
    case EIO:
    case EUCLEAN:
      return FailureCode::kDataLoss;
    default:
      return FailureCode::kUnknown;
  }
}

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_ERRNO_CODE_H_
