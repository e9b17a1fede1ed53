"""The file that node exporter reads: which one was written last, whatever is configured now.

    /var/lib/forestage/textfile.json    `LastTextfile`; written before the file itself is

One that stays behind after a change of `metrics.textfile` exports its values for ever, and twice
where node exporter reads both. All of it happens under `hold_metrics_lock`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.config import Config
from forestage.paths import NodePaths
from forestage.system import folders, lock, records

LOCK_TIMEOUT = 10.0  # seconds for another `forestage metrics` to end
# what features/metrics/export.format_metrics makes, whose first family is the release
TEXT_START = b"# HELP forestage_"
DEFAULT_PATH = Config().metrics.textfile


class LastTextfile(msgspec.Struct, frozen=True):
    """textfile.json: what `metrics.textfile` was at the last run."""

    path: str | None = DEFAULT_PATH


def locate_record(places: NodePaths) -> Path:
    """Return where textfile.json is. Pure."""
    return places.root / "var/lib/forestage/textfile.json"


@contextlib.contextmanager
def hold_metrics_lock(places: NodePaths, patience: float) -> Iterator[None]:
    """Hold the lock that lets one run at a time read, count and write.

    Raises OSError, lock.LockTimeout.
    Older counts must not replace newer ones: Prometheus takes a counter that falls for one that
    has begun anew, and adds it up a second time.
    """
    folders.ensure_directory(places.tally.parent, 0o750)
    folders.ensure_directory_with_mode(places.locks)
    with lock.held_for_work(places.locks / "metrics.lock", patience):
        yield


def find_last_textfile(places: NodePaths) -> str | None:
    """Return what `metrics.textfile` was at the last run; None if none was written then.

    The default where that is not known. Raises OSError.
    """
    return (records.find(locate_record(places), LastTextfile) or LastTextfile()).path


def replace_last_textfile(places: NodePaths, path: str | None) -> None:
    """Delete the file of the last run if it is another one now, and record this. Raises OSError."""
    last = find_last_textfile(places)
    if last == path:
        return
    if last is not None and _is_ours(places, last):
        (places.root / last.lstrip("/")).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a node may have nowhere to keep it
        folders.ensure_directory(locate_record(places).parent, folders.PASSABLE)
        records.write(locate_record(places), msgspec.json.encode(LastTextfile(path)))


def _is_ours(places: NodePaths, path: str) -> bool:
    try:
        return records.read_raw(places.root / path.lstrip("/")).startswith(TEXT_START)
    except (FileNotFoundError, NotADirectoryError, records.DamagedRecord):
        return False
