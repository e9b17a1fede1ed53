"""Notes in /run that one user may read. They are root's: /run is memory, which owners could fill.

/run/forestage/images/full-UID            full_store.py
/run/forestage/images/JOB.STEP.refused    refusals.py
"""

import os
import struct
from pathlib import Path
from typing import TypeVar

import msgspec

from forestage.system import records
from forestage.system.files import opened

T = TypeVar("T")

SMALL = 64 * 1024  # bytes
ACL = "system.posix_acl_access"  # linux/posix_acl_xattr.h


def write_note(path: Path, uid: int, note: msgspec.Struct) -> None:
    """Writes a note that this user, and no other one, may read. As root; raises OSError."""
    records.write(path, msgspec.json.encode(note))
    os.setxattr(path, ACL, _readable_by(uid), follow_symlinks=False)


def find_note(path: Path, of: type[T]) -> T | None:
    """Return the note for the user whom this process is; None if there is none that can be read."""
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return msgspec.json.decode(os.read(fd, SMALL), type=of)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _readable_by(uid: int) -> bytes:
    """Pure: an ACL. The file stays root's."""
    everybodys = 0xFFFFFFFF
    owner, group, mask, others = (1, 6), (4, 0), (16, 4), (32, 0)
    entries = [(*owner, everybodys), (2, 4, uid)]
    entries += [(*one, everybodys) for one in (group, mask, others)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in entries)
