"""What goes wrong, as one exception class: a code, a message, and the errno behind it."""

from __future__ import annotations

import builtins
import contextlib
import errno as errno_
from collections.abc import Iterator

__all__ = ["Error", "TimeoutError"]

# The canonical codes of absl::StatusCode.
_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


class Error(Exception):
    """An operation that failed. The message names operation, object and reason.

    Attributes:
        code: one of absl's canonical codes, e.g. ``"RESOURCE_EXHAUSTED"`` or ``"DATA_LOSS"``.
        message: operation, object and reason.
        errno: of the system call that failed; 0 when none did.
    """

    def __init__(self, code: str, message: str, errno: int = 0) -> None:
        super().__init__(code, message, errno)
        self.code = code
        self.message = message
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class TimeoutError(Error, builtins.TimeoutError):  # type: ignore[misc]  # errno, in both
    """A wait that ended before what it waited for; the operation itself goes on.

    What has failed of a deadline of its own (a stalled worker, ranks that did not come) is an
    `Error` with the code DEADLINE_EXCEEDED, and no TimeoutError.
    """


# By errno; what else the system refuses is UNAVAILABLE.
_CODE_OF_ERRNO = {
    errno_.ENOENT: "NOT_FOUND",
    **dict.fromkeys(
        (errno_.ENOSPC, errno_.EDQUOT, errno_.EMFILE, errno_.ENFILE, errno_.ENOMEM, errno_.EFBIG),
        "RESOURCE_EXHAUSTED",
    ),
}


@contextlib.contextmanager
def of_system(operation: str) -> Iterator[None]:
    """Raises what the system refuses inside as an `Error`; `operation` names the object, too."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        raise Error(
            _CODE_OF_ERRNO.get(number, "UNAVAILABLE"), f"{operation}: {error.strerror}", number
        ) from error


def _of_status(code: int, message: str, errno: int) -> Error:
    """Called by the extension module for every status that is not OK."""
    name = _CODES[code] if 0 <= code < len(_CODES) else "UNKNOWN"
    return Error(name, message, errno)
