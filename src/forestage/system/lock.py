"""The locks of a node: one for each key's copy, one for the cache's space and its leases.

Order, where both are held: key first, then space. Space is held for milliseconds only, and never
across a look at the shared file system.

A lock file goes only while it is held, by `remove_if_free`. Whoever has opened it before gets the
lock of a file without a name then, sees that by st_nlink, and opens the path again:

    A opens the file     R locks it, unlinks it, lets it go     A locks it: st_nlink is 0, once more

`held` is flock(2) alone, for the short locks of hooks. `held_for_work` is filelock's, for a process
for which nobody waits. Each sees what the other holds (docs/decisions/0054-two-kinds-of-locks.md).
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from forestage.errors import Failed

SPACE_TIMEOUT = 60.0  # seconds; held for milliseconds, but hundreds of hooks may stand in line
POLL = 0.02  # seconds; how soon a waiting hook notices that a copy has ended


class LockTimeout(Failed):
    """Another process holds the lock and did not release it in time."""

    def __init__(self, what: str) -> None:
        super().__init__("busy", what)


@contextlib.contextmanager
def held(path: Path, timeout: float) -> Iterator[None]:
    """Holds the lock file `path` (flock(2), gone when the process is). Raises LockTimeout, OSError.

    `timeout` in seconds; 0 tries once. The file stays.
    """
    until = time.monotonic() + timeout
    while (fd := acquire_now(path)) is None:
        if time.monotonic() >= until:
            raise LockTimeout(f"{path.name} is held by another process")
        time.sleep(min(POLL, max(0.0, until - time.monotonic())))
    try:
        yield
    finally:
        # A child that was forked meanwhile may have the descriptor too.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def acquire_now(path: Path) -> int | None:
    """Return a descriptor that has the lock, or None if another process has it.

    The lock is held until the last copy of the descriptor is closed: a process that inherits it
    holds the lock as long as it lives. Makes no folder: where the cache's disk is not mounted it
    would be on the root disk. Raises OSError.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            # Only then: O_CREAT waits for a disk that takes no writes, though the file is there.
            fd = os.open(path, flags | os.O_CREAT, 0o600)
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
def held_for_work(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path` while a copy is made or a command works.

    Raises LockTimeout, OSError.
    `timeout` in seconds; 0 tries once. The file stays. A child that is forked meanwhile does not
    hold the lock. The directory above the lock's folder must be one that users cannot list, which
    /run is not (NodePaths.locks): filelock calls mkdir(2) for the folder though it is there.
    """
    # Its import takes longer than all that a hook does.
    import filelock

    # filelock makes the folder: where the cache's disk is gone, it would be on the root disk.
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    # By default any user could hold the lock (mode 0644). And where there is no flock(2), it would
    # make a file that stays when its process is killed: no other one would copy the key.
    work = filelock.UnixFileLock(path, mode=0o600, fallback_to_soft=False)
    try:
        work.acquire(max(0.0, timeout), poll_interval=POLL)
    except filelock.Timeout:
        raise LockTimeout(f"{path.name} is held by another process") from None
    try:
        yield
    finally:
        work.release()


@contextlib.contextmanager
def held_if_writable(path: Path, timeout: float) -> Iterator[None]:
    """Holds the lock as `held` does, or goes on without it where the disk is read-only or gone.

    For unmounting redirects, which is right without a lock as well. Raises LockTimeout, OSError.
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


def acquire_slot(
    folder: Path, name: str, slot_count: int, slots_held: contextlib.ExitStack
) -> int | None:
    """Take one of `slot_count` slots of this name, if one is free; return its number, or None.

    It is held until `slots_held` ends. Raises OSError.
    """
    for number in range(slot_count):
        with contextlib.suppress(LockTimeout):
            slots_held.enter_context(held(folder / f"{name}.{number}.lock", 0))
            return number
    return None


def lock_byte(file: Path, byte: int, is_blocking: bool) -> int:
    """Has this process lock a byte of a file until it closes what this returns, or ends.

    One that hangs keeps it. If `is_blocking`, a signal ends that. Raises BlockingIOError, OSError.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | (0 if is_blocking else fcntl.LOCK_NB), 1, byte)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove_if_free(path: Path) -> None:
    """Removes a lock file that nobody holds now. Raises OSError."""
    with contextlib.suppress(LockTimeout), held(path, 0):
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
