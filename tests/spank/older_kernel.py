"""Runs a program as on a kernel without the mount API of Linux 5.2: each call of it is ENOSYS."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
FIRST, LAST = 428, 433  # open_tree(2), move_mount(2), fsopen(2) and its kin
# linux/filter.h, linux/seccomp.h: code, jumps if true and if false, operand.
FILTER = (
    (0x20, 0, 0, 0),  # the call's number
    (0x35, 0, 2, FIRST),
    (0x25, 1, 0, LAST),
    (0x06, 0, 0, 0x00050000 | errno.ENOSYS),  # SECCOMP_RET_ERRNO
    (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
)


def main() -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in FILTER))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(FILTER), ctypes.addressof(code))
    )
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
