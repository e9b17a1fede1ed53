"""That the store had no room for an image, noted on this node: nobody imports it in vain meanwhile.

    /run/forestage/images/full-UID    root's, for that user to read: the last such image of theirs

A step that the store failed has its image imported for itself alone (admin/registry.get), and the
next ones, too, until the store has more room or SECONDS are over.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.paths import Places
from forestage.system import records
from forestage.system.as_user import User
from forestage.system.files import opened

SECONDS = 600.0
SMALL = 64 * 1024  # bytes


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
        path = _file(os.fspath(places.images), user.uid)
        records.write(path, msgspec.json.encode(full))
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            os.fchown(fd, user.uid, -1)
            os.fchmod(fd, 0o400)


def noted(folder: str, name: str, now: float) -> Full | None:
    """What is noted of an image of the user whom this process is, while that counts."""
    try:
        with opened(_file(folder, os.geteuid()), os.O_RDONLY | os.O_NONBLOCK) as fd:
            full = msgspec.json.decode(os.read(fd, SMALL), type=Full)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return full if full.name == name and 0 < full.until - now <= SECONDS else None


def _file(folder: str, uid: int) -> Path:
    return Path(folder, f"full-{uid}")
