"""Files that are deleted, and that something holds: their bytes stay on the disk.

    <cache>/held/<handle>    JSON of `Held`: written before the file's name goes

Who has an evicted entry open keeps it, a job that reads on as well as a user who fills the disk in
this way. So it counts for the user as if it were an entry (cache/evict.py); for its users in
equal parts, where several had it: any of them may be who holds it. So does the disk of a job's own
directory, for as long as its loop device stays.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.system import files, handles, records
from forestage.system.files import opened

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class Held(msgspec.Struct, frozen=True):
    """A file without a name: its bytes on the disk, and the uids of its users; (): unknown.

    `name` is the last part of the path that it had.
    """

    handle: handles.Handle
    bytes: int
    users: tuple[int, ...] = ()
    name: str = "image"


@contextlib.contextmanager
def noted(folder: Path, file: Path, users: tuple[int, ...]) -> Iterator[None]:
    """Notes that a file is held which is deleted meanwhile, if it is. Never raises.

    `folder` is where such notes lie. A process that is killed leaves them, and `gather` finds out.
    """
    one = _found(file, users)
    if one is not None:
        _write(folder, one)
    yield
    if one is None:
        return
    with contextlib.suppress(OSError), opened(folder.parent, _FOLDER) as top:
        if handles.facts(top, one.handle) is None:
            _file(folder, one).unlink(missing_ok=True)
        else:
            _write(folder, one)  # a disk that was full has room by now


def gather(folder: Path) -> tuple[Held, ...]:
    """What is held; notes of the rest are deleted, but on a disk that is read-only. Who may not ask
    is told what was noted.

    Raises OSError.
    """
    found = []
    with opened(folder.parent, _FOLDER) as top:
        for file in sorted(folder.glob("*")):
            one = records.find(file, Held)
            with contextlib.suppress(PermissionError):
                facts = handles.facts(top, one.handle) if one else None
                if one is None or facts is None or facts.st_nlink:
                    with contextlib.suppress(OSError):
                        file.unlink(missing_ok=True)
                    continue
                one = msgspec.structs.replace(one, bytes=facts.st_blocks * 512)
            found += [one] if one else []
    return tuple(found)


def of_users(folder: Path) -> Counter[int]:
    """The bytes that are held, by the uid of whom they count for; 0: nobody."""
    found: Counter[int] = Counter()
    for one in gather(folder):
        for user in one.users or (0,):
            found[user] += one.bytes // (len(one.users) or 1)
    return found


def _found(file: Path, users: tuple[int, ...]) -> Held | None:
    with contextlib.suppress(OSError):
        facts = files.facts(file)
        handle = handles.of(file) if facts else None
        if facts and handle:
            return Held(handle, facts.st_blocks * 512, users, file.name)
    return None


def _write(folder: Path, one: Held) -> None:
    """Not synced: after a power cut nothing is held."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        files.overwrite(_file(folder, one), msgspec.json.encode(one))


def _file(folder: Path, one: Held) -> Path:
    return folder / one.handle.name
