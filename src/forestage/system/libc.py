"""The C library's calls for which Python has no function.

It is loaded with the first of them: ctypes takes milliseconds, and most hooks need none.
"""

import functools
import os
from typing import Any


def preload_libc() -> None:
    """Load the C library now, for a process that will find no module later."""
    _load_libc()


def call_libc(name: str, *arguments: Any, about: str | None = None) -> int:
    """Calls a function that returns a negative number for an error. Raises OSError for that.

    `about` is what the error names: a path, mostly. An `int` is passed as 32 bits.
    """
    ctypes, libc = _load_libc()
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), about)
    return result


def make_buffer(size: int, data: bytes = b"") -> Any:
    """So many bytes that a call may fill, beginning with `data`."""
    ctypes, _ = _load_libc()
    return ctypes.create_string_buffer(data, size)


def make_int64(number: int) -> Any:
    """A number of 64 bits, for a call's argument: an offset or a length."""
    ctypes, _ = _load_libc()
    return ctypes.c_int64(number)


@functools.cache
def _load_libc() -> tuple[Any, Any]:
    import ctypes

    return ctypes, ctypes.CDLL(None, use_errno=True)
