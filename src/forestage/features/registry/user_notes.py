"""Notes in /run that one user may read. They are root's: /run is memory, which owners could fill.

    /run/forestage/images/full-UID            the last image of that user for which the store had no
                                              room: nobody imports it in vain meanwhile
    /run/forestage/images/JOB.STEP.refused    why a registry gave a step no digest

A step that the store failed has its image imported for itself alone
(features/registry/store_commands.obtain_for_step), and the
next ones, too, until the store has more room or FULL_SECONDS are over. The importer of a step that
a registry refused does not ask again.
"""

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from forestage.errors import Declined
from forestage.features.registry import reference
from forestage.paths import NodePaths
from forestage.system import records
from forestage.system.as_user import User
from forestage.system.files import ACL, encode_acl, open_descriptor

T = TypeVar("T")

SMALL = 64 * 1024  # bytes
FULL_SECONDS = 600.0
REFUSALS = (
    "registry-denied",
    "registry-missing",
    "registry-busy",
    "registry-silent",
    "registry-odd",
)
"""Reasons why there is no digest; enroot itself may fare better, or tells the user why not."""


class FullStoreNote(msgspec.Struct, frozen=True):
    """`name` is the image's in the store, `free` the bytes that the store had then."""

    name: str
    detail: str
    free: int
    until: float


class RefusalNote(msgspec.Struct, frozen=True):
    """What a worker was told of `reference`, the user's text."""

    reference: str
    reason: str
    detail: str


def record_full_store(
    places: NodePaths, user: User, name: str, detail: str, free: int, now: float
) -> None:
    """Notes what a worker of this user's said. As root; best effort."""
    full = FullStoreNote(name, detail, free, now + FULL_SECONDS)
    with contextlib.suppress(OSError):
        write_note(_full_path(os.fspath(places.images), user.uid), user.uid, full)


def find_full_store(folder: str, name: str, now: float) -> FullStoreNote | None:
    """What is noted of an image of the user whom this process is, while that counts."""
    full = find_note(_full_path(folder, os.geteuid()), FullStoreNote)
    return full if full and full.name == name and 0 < full.until - now <= FULL_SECONDS else None


def record_refusal(
    places: NodePaths, job: int, step: int, user: User, refusal: RefusalNote
) -> None:
    """Notes it for the step's importer. As root; best effort."""
    with contextlib.suppress(OSError):
        write_note(_refusal_path(places, str(job), str(step)), user.uid, refusal)


def find_refusal(places: NodePaths, job: str, step: str, text: str) -> Declined | None:
    """Return why the registry refused this image to a step of the user's whom this process is.

    `text` is the image as pyxis has it, which is another text than the user's. Raises Declined if
    it is no reference.
    """
    found = find_note(_refusal_path(places, job, step), RefusalNote)
    if found is None or found.reason not in REFUSALS:
        return None
    if (
        reference.parse_reference(found.reference).canonical_text
        != reference.parse_reference(text).canonical_text
    ):
        return None
    return Declined(found.reason, found.detail)


def write_note(path: Path, uid: int, note: msgspec.Struct) -> None:
    """Writes a note that this user, and no other one, may read. As root; raises OSError."""
    records.write(path, msgspec.json.encode(note))
    os.setxattr(path, ACL, encode_acl(uid, owner=6, user=4), follow_symlinks=False)


def find_note(path: Path, note_type: type[T]) -> T | None:
    """Return the note for the user whom this process is; None if there is none that can be read."""
    try:
        with open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return msgspec.json.decode(os.read(fd, SMALL), type=note_type)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _full_path(folder: str, uid: int) -> Path:
    return Path(folder, f"full-{uid}")


def _refusal_path(places: NodePaths, job: str, step: str) -> Path:
    return places.images / f"{job}.{step}.refused"
