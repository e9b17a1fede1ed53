"""Reads our own small files, and distinguishes a damaged one from an absent one.

A crash, a bad disk or a careless hand may have left anything under a record's name: half of it,
gigabytes, a directory, a FIFO. To read it must not hang, fill the memory or raise the unexpected.
"""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

LONGEST = 256 << 20  # bytes; no map, and no lease of however many steps, is longer

# What open(2) and read(2) say of a name that is a directory, a link, a socket or a bad block. All
# else is about the node: who may not look, or has too many files open, has found no damage.
_SPOILT = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO, errno.EUCLEAN, errno.EBADMSG)


class Damaged(Exception):
    """Something lies there that was never written so; the text says what."""


def read(path: Path) -> bytes:
    """All bytes of a file of ours. Raises Damaged; OSError where it is not there or not to be had.

    No link is followed: none of our files is one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise Damaged(f"{path}: not a regular file")
            if facts.st_size > LONGEST:
                raise Damaged(f"{path}: more than {LONGEST} bytes")
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _SPOILT:
            raise Damaged(f"{path}: {error.strerror}") from None
        raise


def load(path: Path, of: type[T]) -> T:
    """The JSON record in a file of ours. Raises as `read` does."""
    data = read(path)
    try:
        return msgspec.json.decode(data, type=of)
    # The last one: brackets in brackets, a thousand deep.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{path}: {error}") from None


def is_plain(path: Path) -> bool:
    """Whether a regular file is there, no link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
