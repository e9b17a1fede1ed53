"""That the store had no room for an image, noted on this node: nobody imports it in vain meanwhile.

    /run/forestage/images/full-UID    root's, with an ACL for that user to read: the last such image

A step that the store failed has its image imported for itself alone (admin/registry.get), and the
next ones, too, until the store has more room or SECONDS are over.
"""

import contextlib
import os
import struct
from pathlib import Path

import msgspec

from forestage.paths import Places
from forestage.system import records
from forestage.system.as_user import User
from forestage.system.files import opened

SECONDS = 600.0
SMALL = 64 * 1024  # bytes
ACL = "system.posix_acl_access"  # linux/posix_acl_xattr.h


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
        os.setxattr(path, ACL, _readable_by(user.uid), follow_symlinks=False)


def noted(folder: str, name: str, now: float) -> Full | None:
    """What is noted of an image of the user whom this process is, while that counts."""
    try:
        with opened(_file(folder, os.geteuid()), os.O_RDONLY | os.O_NONBLOCK) as fd:
            full = msgspec.json.decode(os.read(fd, SMALL), type=Full)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return full if full.name == name and 0 < full.until - now <= SECONDS else None


def _readable_by(uid: int) -> bytes:
    """Pure: an ACL. It stays root's: whoever owns a file can write to it, and /run is memory."""
    everybodys = 0xFFFFFFFF
    owner, group, mask, others = (1, 6), (4, 0), (16, 4), (32, 0)
    entries = [(*owner, everybodys), (2, 4, uid)]
    entries += [(*one, everybodys) for one in (group, mask, others)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in entries)


def _file(folder: str, uid: int) -> Path:
    return Path(folder, f"full-{uid}")
