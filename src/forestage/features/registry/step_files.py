"""What this node has of steps whose images come from registries: root's files, gone with the job.

    /run/forestage/images/JOB.STEP.sqsh   what the step's copy is bound over, and the importer names
                          JOB.STEP.json   what the worker said last, while the step waits for it

Users pass through the directory, and cannot list it (system/folders.py). Where nothing is bound
over it, the first has no byte that is not zero: an importer knows by the missing magic number that
it has to look elsewhere. The second goes with its import; what a killed process left is known by
its pid.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.paths import NodePaths
from forestage.system import folders, processes, records
from forestage.system.files import open_descriptor

OLD = 86400.0  # seconds; no import takes so long
PROCESS_NAME = (
    "forestage-image"  # in ps(1); who starts the worker (features/registry/step_image.py)
)
MODE = 0o444  # a user finds their step's, and reads what is bound over it as its own mode lets them


class StepPlaceholder(msgspec.Struct, frozen=True):
    """The path, and by what the companion knows the file: inode, size, mtime and ctime in ns."""

    path: str
    file_stamp: tuple[int, int, int, int]


def make_placeholder(places: NodePaths, job: int, step: int | None, size: int) -> StepPlaceholder:
    """Makes it anew. Raises OSError.

    It has the copy's size in bytes, of which it takes nothing: a file that is read through must
    have the size of what it is mounted over.
    """
    folders.ensure_directory_with_mode(places.images, folders.PASSABLE)
    path = places.images / f"{job}.{step}.sqsh"
    path.unlink(missing_ok=True)
    with open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE) as fd:
        os.ftruncate(fd, size)
        os.fchmod(fd, MODE)
        found = os.fstat(fd)
    facts = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return StepPlaceholder(os.fspath(path), facts)


def delete_job_files(places: NodePaths, job: int) -> None:
    """Deletes all that is there of a job. Raises OSError."""
    folders.ensure_directory_with_mode(places.images, folders.PASSABLE)
    for path in places.images.glob(f"{job}.*"):
        path.unlink(missing_ok=True)


def list_leftovers(places: NodePaths, jobs: frozenset[int], now: float) -> list[Path]:
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


class StepImport(msgspec.Struct, frozen=True):
    """A step that waits; `where` is the node that imports, "" if that is not known.

    `said` is how far the import is, for people; `since` is in seconds of the epoch.
    """

    job: int
    step: int
    user: str
    reference: str
    since: float
    pid: int
    where: str = ""
    said: str = ""


def record_import(places: NodePaths, one: StepImport) -> None:
    """Best effort: nobody's start depends on it."""
    with contextlib.suppress(OSError):
        records.write(_import_path(places, one), msgspec.json.encode(one))


def delete_import_record(places: NodePaths, one: StepImport) -> None:
    with contextlib.suppress(OSError):
        _import_path(places, one).unlink(missing_ok=True)


def list_imports(places: NodePaths) -> tuple[StepImport, ...]:
    """Those whose process lives, the longest wait first. Raises OSError."""
    found = []
    for path in places.images.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, records.DamagedRecord):
            one = records.load(path, StepImport)
            # Its pid may be a user's by now, whose name is what that user likes.
            process = Path(f"/proc/{one.pid}")
            if processes.read_name(process) == PROCESS_NAME and processes.is_trusted(process):
                found.append(one)
    return tuple(sorted(found, key=lambda one: one.since))


def _import_path(places: NodePaths, one: StepImport) -> Path:
    return places.images / f"{one.job}.{one.step}.json"
