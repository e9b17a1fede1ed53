"""That the store had no room for an image, noted on this node: nobody imports it in vain meanwhile.

    /run/forestage/images/full-UID    root's, with an ACL for that user to read: the last such image

A step that the store failed has its image imported for itself alone (admin/registry.get), and the
next ones, too, until the store has more room or SECONDS are over.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.paths import Places
from forestage.registry.user_notes import find_note, write_note
from forestage.system.as_user import User

SECONDS = 600.0


class Full(msgspec.Struct, frozen=True):
    """`name` is the image's in the store, `free` the bytes that the store had then."""

    name: str
    detail: str
    free: int
    until: float


def note(places: Places, user: User, name: str, detail: str, free: int, now: float) -> None:
    """Notes what a worker of this user's said. As root; best effort."""
    full = Full(name, detail, free, now + SECONDS)
    with contextlib.suppress(OSError):
        write_note(_file(os.fspath(places.images), user.uid), user.uid, full)


def noted(folder: str, name: str, now: float) -> Full | None:
    """What is noted of an image of the user whom this process is, while that counts."""
    full = find_note(_file(folder, os.geteuid()), Full)
    return full if full and full.name == name and 0 < full.until - now <= SECONDS else None


def _file(folder: str, uid: int) -> Path:
    return Path(folder, f"full-{uid}")
