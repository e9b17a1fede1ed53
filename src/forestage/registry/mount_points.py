"""The file over which a step's copy of a registry's image is bound, and which the importer names.

    /run/forestage/images/JOB.STEP.sqsh

Users pass through the directory, and cannot list it (system/folders.py).
Where nothing is bound over it, it has no byte that is not zero: an importer knows by the missing
magic number that it has to look elsewhere.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.paths import Places
from forestage.system import folders
from forestage.system.files import opened

OLD = 86400.0  # seconds; no import takes so long
MODE = 0o444  # a user finds their step's, and reads what is bound over it as its own mode lets them


class MountPoint(msgspec.Struct, frozen=True):
    """The path, and by what the companion knows the file: inode, size, mtime and ctime in ns."""

    path: str
    facts: tuple[int, int, int, int]


def make(places: Places, job: int, step: int | None, size: int) -> MountPoint:
    """Makes it anew. Raises OSError.

    It has the copy's size in bytes, of which it takes nothing: a file that is read through must
    have the size of what it is mounted over.
    """
    folders.keep(places.images, folders.PASSABLE)
    path = places.images / f"{job}.{step}.sqsh"
    path.unlink(missing_ok=True)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE) as fd:
        os.ftruncate(fd, size)
        os.fchmod(fd, MODE)
        found = os.fstat(fd)
    facts = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return MountPoint(os.fspath(path), facts)


def forget(places: Places, job: int) -> None:
    """Deletes those of a job's steps, and all else of it there. Raises OSError."""
    folders.keep(places.images, folders.PASSABLE)
    for path in places.images.glob(f"{job}.*"):
        path.unlink(missing_ok=True)


def leftover(places: Places, jobs: frozenset[int], now: float) -> list[Path]:
    """What is old there, and of a step whose job is none of `jobs`. Raises OSError.

    A step whose image is still being imported holds no lease.
    """
    staying = set(map(str, jobs))
    with contextlib.suppress(FileNotFoundError):
        return [
            path
            for path in sorted(places.images.iterdir())
            if path.name.partition(".")[0] not in staying and now - os.lstat(path).st_mtime > OLD
        ]
    return []
