"""Which files of a user's directory in the store go: old images, and what dead imports left.

The plan is pure. It is carried out as the directory's owner, as root is nobody on many file
servers; an image that was used meanwhile stays. No file is opened but small records of the owner's.
No file's time is compared with a node's clock: store_age.py says how old it is at least.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from forestage.features.registry import store_age
from forestage.features.registry.store import FILE, ImageRecord
from forestage.features.registry.store_age import CollectionSighting, StoreCollection
from forestage.features.registry.store_files import find_own_record, open_own_file
from forestage.system.files import open_descriptor

LIVE = 3600.0  # seconds without a sign of life after which an import is dead, by whatever clock
RECENT = 3600.0  # seconds since its last use in which an image stays, whatever there is of others
OF_JOB = 2 * 86400.0  # seconds for an image of one job, which nobody can find later
RECORDS = 30 * 86400.0  # seconds for what tags meant
LEFT = 86400.0  # seconds for all that is left of nothing
MOST = 200_000  # names looked at in one directory


class StoreFile(msgspec.Struct, frozen=True):
    """A file of the owner's; `kind` is what FILE says, else "job", "tag" or "new".

    `age` is for how many seconds it has certainly not been touched; see `add_ages`.
    """

    path: str  # in the directory
    name: str
    kind: str
    size: int
    mtime_ns: int = 0
    age: float = 0.0


class StoredImage(msgspec.Struct, frozen=True):
    """An image: bytes on disk, and when it was used last, by the clock that set its times.

    `age` is for how many seconds it has certainly been unused. `noted_ns` is its record's mtime.
    """

    name: str
    size: int
    used: float
    age: float
    noted_ns: int


class StoreGarbage(msgspec.Struct, frozen=True):
    """What is to go: images, and files that belong to none."""

    images: tuple[StoredImage, ...]
    files: tuple[str, ...]


class CollectionResult(msgspec.Struct, frozen=True):
    """What went of a user's directory, or would go; `problem` is why not all of it.

    `user` is for who asks of many directories.
    """

    user: str = ""
    images: tuple[str, ...] = ()
    bytes: int = 0
    files: int = 0
    problem: str = ""


def add_ages(
    files: Sequence[StoreFile], collection: StoreCollection, server: int | None
) -> list[StoreFile]:
    """Pure: the files with their ages, by what the store counted, and by the server's own clock.

    `server` is what that says, in ns; None where nodes set the times.
    """
    found = []
    for file in files:
        age = collection.unchanged_seconds(file.path, file.mtime_ns)
        if server is not None:
            age = max(age, (server - file.mtime_ns) / 1e9)
        found.append(msgspec.structs.replace(file, age=age))
    return found


def list_images(files: Sequence[StoreFile]) -> list[StoredImage]:
    """Pure: the images among the files, used longest ago first."""
    records = {file.name: file for file in files if file.kind == "json"}
    found = []
    for file in files:
        if file.kind == "sqsh":
            noted = records.get(file.name)
            both = [file, noted] if noted else [file]
            used = max(one.mtime_ns for one in both) / 1e9
            age = min(one.age for one in both)
            noted_ns = noted.mtime_ns if noted else 0
            found.append(StoredImage(file.name, file.size, used, age, noted_ns))
    # Times of several clocks only decide between images that are equally old for certain.
    return sorted(found, key=lambda image: (-image.age, image.used, image.name))


def plan_collection(files: Sequence[StoreFile], keep: float, most: int | None) -> StoreGarbage:
    """Pure: what goes, where images stay `keep` seconds and take `most` bytes together.

    Files that are no images, and imports that go on, leave them so much less.
    """
    held = list_images(files)
    taken = sum(file.size for file in files if file.kind in ("sqsh", "") or _is_part(file))
    going = []
    for image in held:
        limit = min(keep, OF_JOB) if image.name.startswith("job-") else keep
        above = most is not None and taken > most
        if image.age > limit or (above and image.age > RECENT):
            going.append(image)
            taken -= image.size
    by_name: dict[str, list[StoreFile]] = {}
    for file in files:
        by_name.setdefault(file.name, []).append(file)
    left = [file.path for file in files if _is_leftover(file, by_name[file.name])]
    return StoreGarbage(tuple(going), tuple(left))


def _is_leftover(file: StoreFile, of_image: Sequence[StoreFile]) -> bool:
    age = file.age
    lives = any(one.kind.startswith("lease.") and one.age < LIVE for one in of_image)
    if file.kind in ("job", "tag"):
        return age > RECORDS
    if _is_part(file):
        return age > LIVE and not lives
    if file.kind.startswith("lease."):
        return age > LIVE
    if file.kind == "json":
        return age > LIVE and not lives and not any(one.kind == "sqsh" for one in of_image)
    return file.kind in ("wanted", "failed", "new") and age > LEFT


def _is_part(file: StoreFile) -> bool:
    return file.kind.endswith("part")


def list_files(folder: Path) -> list[StoreFile]:
    """The files of a user's directory, whom this process is or acts as. Raises OSError."""
    found = list(_scan_directory(folder, ""))
    for kind, below in (("job", "jobs"), ("tag", "tags")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += [
                msgspec.structs.replace(file, kind=kind)
                for file in _scan_directory(folder / below, below)
            ]
    return found


def _scan_directory(folder: Path, below: str) -> Iterator[StoreFile]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with open_descriptor(folder, flags) as handle, os.scandir(handle) as entries:
        for entry in islice(entries, MOST):
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                    match = FILE.fullmatch(entry.name)
                    other = "new" if entry.name.startswith(".") else ""
                    yield StoreFile(
                        path=os.path.join(below, entry.name),
                        name=match["name"] if match else entry.name,
                        kind=match["kind"] if match else other,
                        size=facts.st_blocks * 512,
                        mtime_ns=facts.st_mtime_ns,
                    )


def claim_collection(
    folder: Path, sight: CollectionSighting | None, now: float
) -> tuple[str, StoreCollection | None]:
    """As `store_age.begin_collection_if_due`; the store is scanned once it is this node's turn."""

    def times() -> Iterator[tuple[str, int]]:
        return ((file.path, file.mtime_ns) for file in list_files(folder))

    return store_age.begin_collection_if_due(folder, sight, times, now)


def collect_garbage(
    folder: Path, keep: float, most: int | None, collection: StoreCollection, dry_run: bool
) -> CollectionResult:
    """Carries the plan out, as the directory's owner. Raises OSError where it cannot be read."""
    # The server first: what is touched after its answer is younger than nothing.
    server = store_age.find_server_time(folder)
    planned = plan_collection(add_ages(list_files(folder), collection, server), keep, most)
    if dry_run:
        names = tuple(image.name for image in planned.images)
        size = sum(image.size for image in planned.images)
        return CollectionResult(images=names, bytes=size, files=len(planned.files))
    gone, size, files, problem = [], 0, 0, ""
    for image in planned.images:
        try:
            if _delete_unless_used(folder, image):
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
    return CollectionResult(images=tuple(gone), bytes=size, files=files, problem=problem)


def _delete_unless_used(folder: Path, image: StoredImage) -> bool:
    """Deletes an image, unless a job has found it since the plan was made."""
    record = folder / f"{image.name}.json"
    # Any other time is a use: one by a node whose clock is behind has an earlier one.
    with contextlib.suppress(FileNotFoundError), open_own_file(record) as fd:
        if os.fstat(fd).st_mtime_ns != image.noted_ns:
            return False
    (folder / f"{image.name}.sqsh").unlink(missing_ok=True)
    for kind in ("json", "wanted", "failed"):
        (folder / f"{image.name}.{kind}").unlink(missing_ok=True)
    return True


def find_record(folder: Path, name: str) -> ImageRecord | None:
    """What is noted of an image."""
    return find_own_record(folder / f"{name}.json", ImageRecord)
