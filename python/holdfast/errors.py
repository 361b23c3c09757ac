"""What goes wrong, as one exception class: a code, a message, and the errno behind it."""

from __future__ import annotations

import builtins
import contextlib
import errno as errno_
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

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


# What an error of a code is besides, for callers that catch the built-in exceptions.
_ALSO = {
    "INVALID_ARGUMENT": ValueError,
    "NOT_FOUND": FileNotFoundError,
    "ALREADY_EXISTS": FileExistsError,
    "PERMISSION_DENIED": PermissionError,
}


def counted(number: int, noun: str) -> str:
    """A number and what it counts: ``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Text that every stream takes: what is not UTF-8 in a path becomes escapes."""
    return text.encode(errors="backslashreplace").decode()


class Error(Exception):
    """An operation that failed. The message names operation, object and reason.

    An error with an errno is also an `OSError`, of the class that Python has for that errno:
    ENOSPC an OSError, ENOENT a FileNotFoundError. By code, INVALID_ARGUMENT is also a ValueError,
    NOT_FOUND a FileNotFoundError, ALREADY_EXISTS a FileExistsError and PERMISSION_DENIED a
    PermissionError.

    Attributes:
        code: one of absl's canonical codes, e.g. ``"RESOURCE_EXHAUSTED"`` or ``"DATA_LOSS"``.
        message: operation, object and reason.
        errno: of the system call that failed; 0 when none did.
    """

    def __new__(cls, code: str, message: str, errno: int = 0) -> Error:
        made: type[Error] = _class_of(cls, code, errno)  # type: ignore[arg-type]  # a class is hashable
        return super(Error, made).__new__(made, code, message, errno)

    def __init__(self, code: str, message: str, errno: int = 0) -> None:
        # Not by super(): OSError takes other arguments.
        BaseException.__init__(self, code, message, errno)
        self.code = code
        self.message = message
        self.errno = errno
        if isinstance(self, OSError):
            self.strerror = os.strerror(errno) if errno else message

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (isinstance(self, TimeoutError), *self.args), self.__dict__


class TimeoutError(Error, builtins.TimeoutError):  # type: ignore[misc]  # errno, in both
    """A wait that ended before what it waited for; the operation itself goes on.

    What has failed of a deadline of its own (a stalled worker, ranks that did not come) is an
    `Error` with the code DEADLINE_EXCEEDED, and no TimeoutError.
    """


def _remade(is_timeout: bool, *arguments: Any) -> Error:
    return (TimeoutError if is_timeout else Error)(*arguments)


@functools.cache
def _class_of(cls: type[Error], code: str, errno: int) -> type[Error]:
    """The subclass of `cls` that is a built-in exception, too."""
    also: list[type] = []
    if errno:
        found = type(OSError(errno, ""))  # Python's own table of subclasses
        # A TimeoutError of this package says that the operation goes on. ETIMEDOUT ends it.
        also.append(OSError if found is builtins.TimeoutError else found)
    if code in _ALSO:
        also.append(_ALSO[code])  # last: it is OSError whose `__new__` makes the object
    bases: list[type] = [cls]
    for base in also:
        if not any(issubclass(b, base) for b in bases):
            bases = [b for b in bases if not issubclass(base, b)] + [base]
    if len(bases) == 1:
        return cls
    return type(cls.__name__, tuple(bases), {"__module__": cls.__module__, "__doc__": cls.__doc__})


# By errno; what else the system refuses is UNAVAILABLE.
_CODE_OF_ERRNO = {
    errno_.ENOENT: "NOT_FOUND",
    **dict.fromkeys((errno_.ENOTDIR, errno_.EISDIR), "FAILED_PRECONDITION"),
    **dict.fromkeys((errno_.EACCES, errno_.EPERM, errno_.EROFS), "PERMISSION_DENIED"),
    **dict.fromkeys(
        (errno_.ENOSPC, errno_.EDQUOT, errno_.EMFILE, errno_.ENFILE, errno_.ENOMEM, errno_.EFBIG),
        "RESOURCE_EXHAUSTED",
    ),
}


def reason_of(error: BaseException) -> str:
    """What other ranks are told of an exception. One of Python's alone says little without its class."""
    return str(error) if isinstance(error, Error) else repr(error)


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`; before Python 3.11 the attribute alone, which tracebacks do not show."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]


@contextlib.contextmanager
def of_operation(operation: str) -> Iterator[None]:
    """Lets errors of this package name the operation."""
    try:
        yield
    except Error as error:
        raise Error(error.code, f"{operation}: {error.message}", error.errno) from error


@contextlib.contextmanager
def of_system(operation: str) -> Iterator[None]:
    """Raises what the system refuses inside as an `Error`; `operation` names the object, too."""
    try:
        yield
    except Error:
        raise
    except OSError as error:
        number = error.errno or 0
        raise Error(
            _CODE_OF_ERRNO.get(number, "UNAVAILABLE"), f"{operation}: {error.strerror}", number
        ) from error


@contextlib.contextmanager
def of_damage(operation: str) -> Iterator[None]:
    """Raises what bytes that no digest proves make Python and PyTorch raise as DATA_LOSS."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise Error("DATA_LOSS", f"{operation}: {error!r:.300}") from error


@contextlib.contextmanager
def needs_torch(name: str) -> Iterator[None]:
    """Says of what is imported inside that it needs PyTorch, where that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"{name} needs PyTorch: install torch", name="torch") from error


# How messages of the runtime name an option; in Python options have no struct.
_STRUCT = re.compile(r"\b(?:CheckpointerOptions|StagingOptions|Qos)::|(?<=\boption )(?:staging|qos)\.")


def _of_status(code: int, message: str, errno: int, is_timeout: bool = False) -> Error:
    """Called by the extension module for every status that is not OK."""
    name = _CODES[code] if 0 <= code < len(_CODES) else "UNKNOWN"
    return _remade(is_timeout, name, _STRUCT.sub("", message), errno)
