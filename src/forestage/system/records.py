"""Our own small files: written whole or not at all, read without trust.

A crash, a bad disk or a careless hand may have left anything under a record's name: half of it,
a directory, a link, a FIFO. To read it must not hang or raise the unexpected, and a damaged record
is distinguished from an absent one. What is written is there after a power cut, or what
was there before.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from forestage.system import files, libc
from forestage.system.files import add_path_to_errors, open_descriptor

T = TypeVar("T")

# What open(2) and read(2) say of a name that is a directory, a link, a socket or a bad block. All
# else is about the node: who may not look, or has too many files open, has found no damage.
_SPOILT = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO, errno.EUCLEAN, errno.EBADMSG)


_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # linux/fcntl.h, linux/fs.h


class DamagedRecord(Exception):
    """Something lies there that was never written so; the text says what."""


def read_raw(path: Path) -> bytes:
    """All bytes of a file of ours.

    Raises DamagedRecord; OSError where it is not there or not to be had.
    No link is followed: none of our files is one.
    """
    try:
        return files.read_file(path)
    except OSError as error:
        if error.errno in _SPOILT:
            raise DamagedRecord(f"{path}: {error.strerror}") from None
        raise


def load(path: Path, record_type: type[T]) -> T:
    """The JSON record in a file of ours. Raises as `read_raw` does."""
    data = read_raw(path)
    try:
        return msgspec.json.decode(data, type=record_type)
    # The last one: brackets in brackets, a thousand deep.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRecord(f"{path}: {error}") from None


def find(path: Path, record_type: type[T]) -> T | None:
    """The record in a file of ours; None where there is none, or a damaged one. Raises OSError."""
    try:
        return load(path, record_type)
    except (FileNotFoundError, NotADirectoryError, DamagedRecord):
        return None


def write(path: Path, data: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Replaces `path`: a temporary file beside it, fsync, rename, fsync of the directory.

    `owner` is (uid, gid), which only root can set; without it the file is the caller's.
    """
    # Not by tempfile, whose import takes a hook as long as all that it writes.
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(new.unlink, missing_ok=True)
        with add_path_to_errors(path), os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.replace(new, path)
        undo.pop_all()
    sync_directory(path.parent)


def rename_no_replace(old: Path, new: Path) -> None:
    """Renames, and replaces nothing: of all that try, one succeeds.

    Raises FileExistsError; OSError with EINVAL where the file system cannot do that.
    """
    names = (_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new))
    libc.call_libc("renameat2", *names, _RENAME_NOREPLACE, about=os.fspath(new))


def sync_directory(path: Path) -> None:
    """Makes renames and new names inside `path` durable."""
    sync_file(path, os.O_DIRECTORY)


def sync_file(path: Path, flags: int = 0) -> None:
    """Makes a file's bytes durable. Raises OSError."""
    with open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | flags) as fd:
        os.fsync(fd)
