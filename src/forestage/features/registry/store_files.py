"""A user's own files in the store: read without trust, and made by one of all nodes.

Who calls this is the user, in all three ids; see store.py.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from forestage.system import records
from forestage.system.files import open_descriptor

T = TypeVar("T")

SMALL = 64 * 1024  # bytes of a record

# link(2) where there are no hard links: exFAT, some FUSE, some file servers.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # a rename that replaces nothing


def find_own_record(path: Path, record_type: type[T], max_bytes: int = SMALL) -> T | None:
    """A small record of the user's own; None where it is missing, damaged or something else."""
    try:
        with open_own_file(path) as fd, open(fd, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1) or b""  # None: of a FIFO that is held open for writing
    except OSError:
        return None
    try:
        return msgspec.json.decode(data, type=record_type) if len(data) <= max_bytes else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


@contextlib.contextmanager
def open_own_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file of this user's own. Raises OSError.

    It is opened even where lstat(2) would do: on NFS attributes are up to a minute old, but those
    of a file that has just been opened.
    """
    with open_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise FileNotFoundError(errno.ENOENT, "no file of this user's", os.fspath(path))
        yield fd


def try_create_file(path: Path, data: bytes) -> bool:
    """Makes a file with these bytes, whole from its first moment; False if it is there already.

    Of all nodes that try, one succeeds. Raises OSError.
    """
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    records.write(new, data)
    try:
        os.link(new, path, follow_symlinks=False)
    except FileExistsError:
        # An NFS client that did not hear the answer asks again: link(2) fails after it succeeded.
        return os.lstat(new).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _try_create_without_links(new, path, data)
    finally:
        new.unlink(missing_ok=True)
    return True


def _try_create_without_links(new: Path, path: Path, data: bytes) -> bool:
    """As `try_create_file`, where there are no hard links.

    By a rename that replaces nothing; where there is none either, it is there and not whole for a
    moment.
    """
    try:
        try:
            records.rename_no_replace(new, path)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
    except FileExistsError:
        return False
    return True
