"""Which files of a user's directory in the store go: old images, and what dead imports left.

The plan is pure. It is carried out as the directory's owner, as root is nobody on many file
servers; an image that was used meanwhile stays. No file is opened but small records of the owner's.

    collected-<n>    the sweep of some node has collected in the nth AGAIN seconds of the epoch
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from forestage.errors import FULL
from forestage.registry.store import FILE, Record, create, load
from forestage.system.files import opened

LIVE = 3600.0  # seconds without a sign of life after which an import is dead, by whatever clock
RECENT = 3600.0  # seconds since its last use in which an image stays, whatever there is of others
OF_JOB = 2 * 86400.0  # seconds for an image of one job, which nobody can find later
RECORDS = 30 * 86400.0  # seconds for what tags meant
LEFT = 86400.0  # seconds for all that is left of nothing
AGAIN = 6 * 3600.0  # seconds in which one node of all collects
STAMP = "collected-"
MOST = 200_000  # names looked at in one directory


class File(msgspec.Struct, frozen=True):
    """A file of the owner's; `kind` is what FILE says, else "job", "tag" or "new"."""

    path: str  # in the directory
    name: str
    kind: str
    size: int
    mtime: float


class StoredImage(msgspec.Struct, frozen=True):
    """An image: bytes on disk, and when it was used last, in seconds since the epoch."""

    name: str
    size: int
    used: float


class Garbage(msgspec.Struct, frozen=True):
    """What is to go: images, and files that belong to none."""

    images: tuple[StoredImage, ...]
    files: tuple[str, ...]


class Done(msgspec.Struct, frozen=True):
    """What went of a user's directory, or would go; `problem` is why not all of it.

    `user` is for who asks of many directories.
    """

    user: str = ""
    images: tuple[str, ...] = ()
    bytes: int = 0
    files: int = 0
    problem: str = ""


def images(files: Sequence[File]) -> list[StoredImage]:
    """Pure: the images among the files, used longest ago first."""
    used = {file.name: file.mtime for file in files if file.kind == "json"}
    found = [
        StoredImage(file.name, file.size, max(used.get(file.name, 0.0), file.mtime))
        for file in files
        if file.kind == "sqsh"
    ]
    return sorted(found, key=lambda image: (image.used, image.name))


def plan(files: Sequence[File], keep: float, most: int | None, now: float) -> Garbage:
    """Pure: what goes, where images stay `keep` seconds and take `most` bytes together.

    Files that are no images, and imports that go on, leave them so much less.
    """
    held = images(files)
    taken = sum(file.size for file in files if file.kind in ("sqsh", "") or _is_part(file))
    going = []
    for image in held:
        age = now - image.used
        limit = min(keep, OF_JOB) if image.name.startswith("job-") else keep
        above = most is not None and taken > most
        if age > limit or (above and age > RECENT):
            going.append(image)
            taken -= image.size
    by_name: dict[str, list[File]] = {}
    for file in files:
        by_name.setdefault(file.name, []).append(file)
    left = [file.path for file in files if _is_left(file, by_name[file.name], now)]
    return Garbage(tuple(going), tuple(left))


def _is_left(file: File, of_image: Sequence[File], now: float) -> bool:
    age = now - file.mtime
    lives = any(one.kind.startswith("lease.") and now - one.mtime < LIVE for one in of_image)
    if file.kind in ("job", "tag"):
        return age > RECORDS
    if _is_part(file):
        return age > LIVE and not lives
    if file.kind.startswith("lease."):
        return age > LIVE
    if file.kind == "json":
        return age > LIVE and not lives and not any(one.kind == "sqsh" for one in of_image)
    return file.kind in ("wanted", "failed", "new") and age > LEFT


def _is_part(file: File) -> bool:
    return file.kind.endswith("part")


def look(folder: Path) -> list[File]:
    """The files of a user's directory, whom this process is or acts as. Raises OSError."""
    found = list(_files(folder, ""))
    for kind, below in (("job", "jobs"), ("tag", "tags")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += [
                msgspec.structs.replace(file, kind=kind) for file in _files(folder / below, below)
            ]
    return found


def _files(folder: Path, below: str) -> Iterator[File]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with opened(folder, flags) as handle, os.scandir(handle) as entries:
        for entry in islice(entries, MOST):
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                    match = FILE.fullmatch(entry.name)
                    other = "new" if entry.name.startswith(".") else ""
                    yield File(
                        path=os.path.join(below, entry.name),
                        name=match["name"] if match else entry.name,
                        kind=match["kind"] if match else other,
                        size=facts.st_blocks * 512,
                        mtime=facts.st_mtime,
                    )


def claim(folder: Path, now: float) -> bool:
    """Whether it is this process' turn to collect: that of one node in AGAIN seconds.

    As the directory's owner. Raises OSError.
    """
    stamp = f"{STAMP}{int(now // AGAIN)}"
    try:
        if os.path.lexists(folder / stamp) or not create(folder / stamp, b""):
            return False
    except OSError as error:
        if error.errno not in FULL:
            raise
        return True  # it is time, though nobody else can be told
    for file in look(folder):
        if file.path.startswith(STAMP) and file.path != stamp:
            (folder / file.path).unlink(missing_ok=True)
    return True


def collect(folder: Path, keep: float, most: int | None, now: float, dry_run: bool) -> Done:
    """Carries the plan out, as the directory's owner. Raises OSError where it cannot be read."""
    planned = plan(look(folder), keep, most, now)
    if dry_run:
        names = tuple(image.name for image in planned.images)
        size = sum(image.size for image in planned.images)
        return Done(images=names, bytes=size, files=len(planned.files))
    gone, size, files, problem = [], 0, 0, ""
    for image in planned.images:
        try:
            if _delete(folder, image):
                gone.append(image.name)
                size += image.size
        except OSError as error:
            problem = str(error)
    for path in planned.files:
        try:
            (folder / path).unlink(missing_ok=True)
            files += 1
        except OSError as error:
            problem = str(error)
    return Done(images=tuple(gone), bytes=size, files=files, problem=problem)


def _delete(folder: Path, image: StoredImage) -> bool:
    """Deletes an image, unless a job has found it since the plan was made."""
    record = folder / f"{image.name}.json"
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(record).st_mtime > image.used:
            return False
    (folder / f"{image.name}.sqsh").unlink(missing_ok=True)
    for kind in ("json", "wanted", "failed"):
        (folder / f"{image.name}.{kind}").unlink(missing_ok=True)
    return True


def record(folder: Path, name: str) -> Record | None:
    """What is noted of an image."""
    return load(folder / f"{name}.json", Record)
