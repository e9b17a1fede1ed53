"""Imports of registries' images that steps of this node wait for, as `status` shows them.

    /run/forestage/images/JOB.STEP.json    root's; what the worker said last

It goes with its import; what a killed process left is known by its pid, and goes with the job.
"""

import contextlib
from pathlib import Path

import msgspec

from forestage.paths import Places
from forestage.system import processes, records

PROCESS_NAME = "forestage-image"  # in ps(1); who starts the worker (hooks/registry.py)


class UnderWay(msgspec.Struct, frozen=True):
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


def note(places: Places, one: UnderWay) -> None:
    """Best effort: nobody's start depends on it."""
    with contextlib.suppress(OSError):
        records.write(_file(places, one), msgspec.json.encode(one))


def forget(places: Places, one: UnderWay) -> None:
    with contextlib.suppress(OSError):
        _file(places, one).unlink(missing_ok=True)


def gather(places: Places) -> tuple[UnderWay, ...]:
    """Those whose process lives, the longest wait first. Raises OSError."""
    found = []
    for path in places.images.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, records.Damaged):
            one = records.load(path, UnderWay)
            # Its pid may be a user's by now, whose name is what that user likes.
            process = Path(f"/proc/{one.pid}")
            if processes.name(process) == PROCESS_NAME and processes.is_trusted(process):
                found.append(one)
    return tuple(sorted(found, key=lambda one: one.since))


def _file(places: Places, one: UnderWay) -> Path:
    return places.images / f"{one.job}.{one.step}.json"
