"""How long the files of a user's directory in the store have lain there unused, by no node's clock.

    collected-<n>   what the nth collection of all nodes saw: each file's mtime, and since when in
                    the store's own seconds it has that one

On most shared file systems the node that touches a file sets its time, and a node's clock may be
wrong by a month. So an mtime is only compared with what it was before, and the store counts its own
seconds: the next collection adds as many as its node has itself seen pass, on its monotonic clock,
since it first met the last one. Two collections are at least so far apart, and a file that all of
them saw with one mtime is at least so old. It is counted too young, never too old.

Where the server sets the times, it is asked for its own as well: by a file that is made there.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from forestage.errors import DISK_FULL_ERRNOS
from forestage.features.registry.store_files import find_own_record, try_create_file
from forestage.system import mounts
from forestage.system.files import open_descriptor

STAMP = re.compile(r"collected-(?P<number>[0-9]{1,18})")
AGAIN = 6 * 3600.0  # seconds that a node must have seen pass before it collects again
MOST = 50_000  # files of which a collection notes the times
LARGE = 32 << 20  # bytes of what it notes: a name has 255 at the most, and JSON some more for them


class FileTime(msgspec.Struct, frozen=True, array_like=True):
    """A file's mtime, and the store's seconds when it was seen first."""

    mtime_ns: int
    since: float


class StoreCollection(msgspec.Struct, frozen=True):
    """A collection, and what it saw; `seconds` is the store's own time then."""

    token: str = ""
    seconds: float = 0.0
    files: dict[str, FileTime] = {}

    def unchanged_seconds(self, path: str, mtime_ns: int) -> float:
        """Pure: for how many seconds a file has certainly had this mtime."""
        known = self.files.get(path)
        same = known is not None and known.mtime_ns == mtime_ns
        return max(0.0, self.seconds - known.since) if known and same else 0.0


class CollectionSighting(msgspec.Struct, frozen=True):
    """When a node first met a collection, on the monotonic clock of its boot."""

    token: str
    at: float


def make_next_collection(
    last: StoreCollection, files: Iterable[tuple[str, int]], waited: float, token: str
) -> StoreCollection:
    """Pure: the next collection, `waited` seconds after `last`; `files` are paths and mtimes."""
    seconds = last.seconds + waited
    times: dict[str, FileTime] = {}
    for path, mtime_ns in files:
        known = last.files.get(path)
        if known is None or known.mtime_ns != mtime_ns:
            known = FileTime(mtime_ns, seconds)
        if len(times) < MOST:
            times[path] = known
    return StoreCollection(token, seconds, times)


def read_last_collection(folder: Path) -> tuple[int, StoreCollection]:
    """Return the number of the last collection, and what it saw; 0 and nothing if there is none.

    As the directory's owner. Raises OSError.
    """
    number = max(_list_collection_numbers(folder), default=0)
    found = (
        find_own_record(folder / f"collected-{number}", StoreCollection, LARGE) if number else None
    )
    return number, found or StoreCollection()


def begin_collection_if_due(
    folder: Path,
    sight: CollectionSighting | None,
    list_files: Callable[[], Iterable[tuple[str, int]]],
    now: float,
) -> tuple[str, StoreCollection | None]:
    """Begin a collection if it is this node's turn: that of one of all nodes, AGAIN after another.

    Returns the token of the last one for this node's next sight, and what it began. `now` and the
    sight's time are of its monotonic clock. As the directory's owner. Raises OSError.
    """
    number, last = read_last_collection(folder)
    waited = now - sight.at if sight and sight.token == last.token else 0.0
    if last.token and waited < AGAIN:
        return last.token, None
    found = make_next_collection(last, list_files(), waited, os.urandom(8).hex())
    try:
        if not try_create_file(folder / f"collected-{number + 1}", msgspec.json.encode(found)):
            return "", None
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        return last.token, found  # it is time, though no other node can be told
    for other in _list_collection_numbers(folder):
        if other <= number:
            (folder / f"collected-{other}").unlink(missing_ok=True)
    return found.token, found


def _list_collection_numbers(folder: Path) -> list[int]:
    with os.scandir(folder) as entries:
        matches = [STAMP.fullmatch(entry.name) for entry in entries]
    return [int(match["number"]) for match in matches if match]


def find_server_time(folder: Path) -> int | None:
    """Return what the file server's clock says, in ns; None if nodes set the times there.

    As the directory's owner. Raises OSError; for a full store it is None.
    """
    with open_descriptor(folder, os.O_PATH | os.O_DIRECTORY) as fd:
        mount = mounts.find_mount_of_descriptor(fd)
    if mount is None or not mount.has_server_times:
        return None
    probe = folder / f".now.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with contextlib.ExitStack() as undo, open_descriptor(probe, flags, 0o600) as fd:
            undo.callback(probe.unlink, missing_ok=True)
            os.utime(fd)  # as those who use an image do
            return os.fstat(fd).st_mtime_ns
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        return None


def compute_unused_seconds(folder: Path, path: str) -> float:
    """Return for how many seconds a file has certainly been unused. Raises OSError.

    As the directory's owner; `path` is below it.
    """
    mtime_ns = os.lstat(folder / path).st_mtime_ns
    server = find_server_time(folder)
    if server is not None:
        return (server - mtime_ns) / 1e9
    return read_last_collection(folder)[1].unchanged_seconds(path, mtime_ns)
