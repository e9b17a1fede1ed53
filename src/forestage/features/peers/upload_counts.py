"""Counts of what the peer service has uploaded, kept in memory and in a file: peer.json.

The service writes the file about once a second; `status`, the stager and the metrics read it. It is
below /run, so it ends with the boot.
"""

import contextlib
from pathlib import Path

import msgspec

from forestage import log
from forestage.system import folders, records
from forestage.units import make_printable

KEYS = 64  # with a count of their own: those uploaded last


class UploadCounts(msgspec.Struct):
    """peer.json: counts since the service began (`since`, seconds since the epoch).

    `keys` are the bytes of each key, for the last ones only.
    """

    since: float
    bytes: int = 0
    chunks: int = 0
    sessions: int = 0
    refused: int = 0
    keys: dict[str, int] = {}

    def key_bytes(self, key: str) -> int:
        """Bytes of one key that were given away, as far as that is known."""
        return self.keys.get(key, 0)


def find_upload_counts(file: Path) -> UploadCounts | None:
    """The counts of this node's service; None where none has run since boot."""
    return records.find(file, UploadCounts)


class UploadCountWriter:
    """The service's counts, and what it refused since the last log line about that."""

    def __init__(self, file: Path, since: float) -> None:
        self._file = file
        self._uploaded = UploadCounts(since)
        self._written: UploadCounts | None = None
        self._unlogged = 0
        self._last = ""

    def count_session(self) -> None:
        self._uploaded.sessions += 1

    def count_chunk(self, key: str, size: int) -> None:
        counts = self._uploaded
        counts.chunks += 1
        counts.bytes += size
        counts.keys[key] = counts.keys.pop(key, 0) + size
        if len(counts.keys) > KEYS:
            del counts.keys[next(iter(counts.keys))]

    def count_refusal(self, client: str, why: str) -> None:
        """Logged with the next `flush`, so that strangers cannot fill the log."""
        self._uploaded.refused += 1
        self._unlogged += 1
        self._last = f"client={client} why={make_printable(why)!r}"

    def flush(self) -> None:
        """Logs what was refused and writes the file, about once a second."""
        if self._unlogged:
            log.write_log_line(f"peer refused={self._unlogged} last: {self._last}", by_slurm=False)
            self._unlogged = 0
        if self._written == self._uploaded:
            return
        with contextlib.suppress(OSError):  # a full /run is no reason to stop the service
            folders.ensure_directory_with_mode(self._file.parent, folders.PASSABLE)
            records.write(self._file, msgspec.json.encode(self._uploaded))
            self._written = msgspec.structs.replace(self._uploaded)
