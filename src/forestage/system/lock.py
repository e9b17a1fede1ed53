"""The locks of a node: one for each key's copy, one for the cache's space and its leases.

Order, where both are held: key first, then space. Space is held for milliseconds only, and never
across a look at the shared file system.

A lock file goes only while it is held, by `remove_if_free`. Whoever has opened it before gets the
lock of a file without a name then, sees that by st_nlink, and opens the path again:

    A opens the file     R locks it, unlinks it, lets it go     A locks it: st_nlink is 0, once more
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from forestage.errors import Failed

SPACE_TIMEOUT = 60.0  # seconds; held for milliseconds, but hundreds of hooks may stand in line
POLL = 0.02  # seconds; how soon a waiting hook notices that a copy has ended


class Busy(Failed):
    """Another process holds the lock and did not release it in time."""

    def __init__(self, what: str) -> None:
        super().__init__("busy", what)


@contextlib.contextmanager
def held(path: Path, timeout: float) -> Iterator[None]:
    """Holds the lock file `path` (flock(2), gone when the process is). Raises Busy, OSError.

    `timeout` in seconds; 0 tries once. The file stays.
    """
    fd = _taken_at_once(path)
    if fd is not None:
        try:
            yield
        finally:
            # A child that was forked meanwhile may have the descriptor too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        return
    # Here: most locks are free, and this import is a seventh of a hook's run.
    from filelock import FileLock, Timeout

    lock = FileLock(
        path,
        timeout=max(0.0, timeout),
        mode=0o600,
        poll_interval=POLL,
        # A lock that is only a file outlives a crash, and then nobody stages on this node again.
        fallback_to_soft=False,
        preserve_lock_file=True,
    )
    try:
        lock.acquire()
    except Timeout:
        raise Busy(f"{path.name} is held by another process") from None
    try:
        yield
    finally:
        lock.release()


def _taken_at_once(path: Path) -> int | None:
    """A descriptor that has the lock, or None where somebody else has it.

    Makes no folder: where the cache's disk is not mounted it would be on the root disk. Raises
    OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except BlockingIOError:  # somebody has a lease on it, F_SETLEASE
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.fstat(fd).st_nlink == 0:  # removed since it was opened, or the whole cache was
            return None
        undo.pop_all()
    return fd


@contextlib.contextmanager
def held_if_writable(path: Path, timeout: float) -> Iterator[None]:
    """Holds the lock as `held` does, or goes on without it where the disk is read-only or gone.

    For unmounting redirects, which is right without a lock as well. Raises Busy, OSError.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(path, timeout))
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EIO):
                raise
        yield


def remove_if_free(path: Path) -> None:
    """Removes a lock file that nobody holds now. Raises OSError."""
    with contextlib.suppress(Busy), held(path, 0):
        path.unlink(missing_ok=True)


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock now. Raises OSError.

    Probes with LOCK_SH, so that probes do not collide. A probe can make an exclusive try fail:
    acquire with a timeout above 0. Reading suffices: the peer service has the cache read-only.
    """
    while True:
        try:
            # Something else may have the lock's name: a FIFO must not hold up who looks.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
