"""Files as open(2) and lstat(2) have them: by descriptor, and without a surprise where none is.

No descriptor that Python opens is inherited by a program (PEP 446), so no call here says O_CLOEXEC.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def opened(
    path: Path | str | bytes, flags: int, mode: int = 0o777, dir_fd: int | None = None
) -> Iterator[int]:
    """A descriptor, as open(2) gives it, closed at the end. Raises OSError."""
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def facts(path: Path) -> os.stat_result | None:
    """What lstat(2) says; None where nothing is there. Raises OSError for any other reason."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
