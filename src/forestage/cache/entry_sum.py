"""The bytes of all entries, kept as a sum: so a hook need not read ten thousand to know it.

Who publishes or evicts an entry adds its bytes or takes them off; who has read all entries, the
sweep above all, corrects the sum. It is a hint, wrong after a crash, and of no use after a boot:

- Too high: somebody reads all entries for nothing, once, and corrects it. What goes is decided by
  what was read, never by the sum.
- Too low: the cache grows above its watermark or `max_size`, or data above its share, by as much,
  until the next sweep. The disk does not fill: `min_free` is asked of statvfs(2).
- None, or one that cannot be read: all entries are read, and there is one.

An entry is added after its rename, and the sum is looked at before the entries are listed. So one
that is published while they are counted is counted once or twice, but never left out.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.cache.part import boot_id
from forestage.system import lock, records
from forestage.system.files import open_descriptor

WIDTH = 160  # bytes of the record: always the same, so that one write replaces all of it
PATIENCE = 0.2  # seconds for the sum's lock, which is held for two system calls


class EntrySum(msgspec.Struct, frozen=True):
    """The record: of which boot, the bytes, and how often all entries were counted in it.

    As long as that is 0, `bytes` are only what has changed since somebody began to count. `data`
    are those of entries that are no images.
    """

    boot: str
    bytes: int = 0
    counted: int = 0
    data: int = 0


def read_sum(file: Path) -> EntrySum | None:
    """The sum of all entries, as far as is known; None where it is not. Raises OSError."""
    found = _find_current(file)
    is_sum = found is not None and found.counted and min(found.bytes, found.data) >= 0
    return found if is_sum else None


def add_bytes(file: Path, change: int, is_data: bool) -> None:
    """Adds the bytes of an entry, or takes them off where negative.

    What cannot be noted makes the sum wrong until the next sweep, and is no error. Nothing is to be
    noted where nobody has begun to count so far.
    """
    with contextlib.suppress(OSError, lock.LockTimeout):
        if _find_current(file) is None:
            return
        with lock.held(file, PATIENCE):
            found = _find_current(file)
            if found is not None:
                total, data = found.bytes + change, found.data + change * is_data
                _write_in_place(file, msgspec.structs.replace(found, bytes=total, data=data))


def begin_count(file: Path) -> EntrySum | None:
    """What the sum is before the entries are counted; None where it cannot be kept.

    The caller holds the space lock until `end_count`: nothing is evicted meanwhile.
    """
    with contextlib.suppress(OSError, lock.LockTimeout), lock.held(file, PATIENCE):
        found = _find_current(file)
        if found is None:
            found = EntrySum(boot_id())
            _write_in_place(file, found)
        return found
    return None


def end_count(file: Path, before: EntrySum | None, bytes_found: int, data_found: int) -> None:
    """Corrects the sum by what was found; what was published since `before` stays added."""
    if before is None:
        return
    with contextlib.suppress(OSError, lock.LockTimeout), lock.held(file, PATIENCE):
        now = _find_current(file)
        if now is not None and now.counted == before.counted:
            total = now.bytes - before.bytes + bytes_found
            data = now.data - before.data + data_found
            _write_in_place(file, EntrySum(now.boot, total, now.counted + 1, data))


def _find_current(file: Path) -> EntrySum | None:
    found = records.find(file, EntrySum)
    return found if found is not None and found.boot == boot_id() else None


def _write_in_place(file: Path, record: EntrySum) -> None:
    """In place: no fsync(2), since a boot ends its use, and no rename, since it is the lock."""
    with open_descriptor(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        os.pwrite(fd, msgspec.json.encode(record).ljust(WIDTH), 0)
