"""Directories in which hooks make names: users can list none of them.

getdents(2) holds its directory's lock while it writes to its caller's memory, and that may be a
FUSE of the caller's own, which answers whenever they like. Until then whoever makes, deletes or
first looks up a name in that directory waits in the kernel, and cannot be killed.
"""

import errno
import os
import stat

PRIVATE = 0o700
PASSABLE = 0o711  # a user reaches what they know the name of


def ensure_directory_with_mode(path: str | os.PathLike[str], mode: int = PRIVATE) -> None:
    """Makes a directory, or gives the one that is there this mode. Raises OSError.

    Somebody's hand may have made it with another one.
    """
    ensure_directory(path, mode)
    if stat.S_IMODE(os.stat(path).st_mode) != mode:  # noqa: PTH116 - pathlib is an import
        os.chmod(path, mode)  # noqa: PTH101


def ensure_directory(path: str | os.PathLike[str], mode: int) -> None:
    """Makes a directory, with those above it, unless it is there. Raises OSError.

    It looks first: mkdir(2) of what exists takes the lock of the directory above as well, and that
    may be `/`, /run or /var/log.
    """
    try:
        found = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        above = os.path.dirname(path)  # noqa: PTH120
        if not os.path.exists(above):
            ensure_directory(above, PASSABLE)
        try:  # noqa: SIM105 - contextlib is an import
            os.mkdir(path, mode)  # noqa: PTH102
        except FileExistsError:
            pass  # another hook was faster
        return
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
