"""The seccomp filter of a container engine that refuses io_uring; as a program, writes it to standard output for bwrap's --seccomp.

io_uring_setup, io_uring_enter and io_uring_register fail with EPERM, everything else is allowed. Source: seccomp(2); the numbers are
the same on all processors.
"""

import struct
import sys

LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO, EPERM = 0x7FFF0000, 0x00050000, 1
CALLS = (425, 426, 427)
INSTRUCTION_BYTES = 8


def _instruction(code: int, if_true: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, 0, value)


FILTER = b"".join((
    _instruction(LOAD_WORD, 0, 0),  # the call's number
    *(_instruction(JUMP_IF_EQUAL, len(CALLS) - i, call) for i, call in enumerate(CALLS)),
    _instruction(RETURN, 0, ALLOW),
    _instruction(RETURN, 0, ERRNO | EPERM),
))

if __name__ == "__main__":
    sys.stdout.buffer.write(FILTER)
