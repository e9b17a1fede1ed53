"""How much was given away? Counted in memory, written now and then for `status` and the metrics."""

from pathlib import Path

import msgspec

from forestage import atomic, log
from forestage.units import printable


class Given(msgspec.Struct):
    """peer.json: counts since the service began (`since`, seconds since the epoch)."""

    since: float
    bytes: int = 0
    chunks: int = 0
    sessions: int = 0
    refused: int = 0


def read(file: Path) -> Given | None:
    """What the service of this node has written; None where none runs, or has run since boot."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Given)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


class Counters:
    """The counts, and what was refused since the last line about that."""

    def __init__(self, file: Path, since: float) -> None:
        self._file = file
        self._given = Given(since)
        self._written: Given | None = None
        self._unsaid = 0
        self._last = ""

    def opened(self) -> None:
        self._given.sessions += 1

    def served(self, size: int) -> None:
        self._given.chunks += 1
        self._given.bytes += size

    def refused(self, client: str, why: str) -> None:
        """Told with the next `flush`: strangers are not to fill the log."""
        self._given.refused += 1
        self._unsaid += 1
        self._last = f"client={client} why={printable(why)!r}"

    def flush(self) -> None:
        """To be called about once a second. Raises OSError."""
        if self._unsaid:
            log.say(f"peer refused={self._unsaid} last: {self._last}", by_slurm=False)
            self._unsaid = 0
        if self._written != self._given:
            self._file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            atomic.write(self._file, msgspec.json.encode(self._given))
            self._written = msgspec.structs.replace(self._given)
