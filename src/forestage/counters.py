"""How much was given away? Counted in memory, written now and then for `status` and the metrics."""

from pathlib import Path

import msgspec

from forestage import log
from forestage.system import atomic, records
from forestage.units import printable

KEYS = 64  # whose bytes are told one by one: those served last


class Given(msgspec.Struct):
    """peer.json: counts since the service began (`since`, seconds since the epoch).

    `keys` are the bytes of each key, for the last ones only.
    """

    since: float
    bytes: int = 0
    chunks: int = 0
    sessions: int = 0
    refused: int = 0
    keys: dict[str, int] = {}

    def of(self, key: str) -> int:
        """Bytes of one key that were given away, as far as that is known."""
        return self.keys.get(key, 0)


def read(file: Path) -> Given | None:
    """What the service of this node has written; None where none runs, or has run since boot."""
    try:
        return records.load(file, Given)
    except (FileNotFoundError, NotADirectoryError, records.Damaged):
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

    def served(self, key: str, size: int) -> None:
        given = self._given
        given.chunks += 1
        given.bytes += size
        given.keys[key] = given.keys.pop(key, 0) + size
        if len(given.keys) > KEYS:
            del given.keys[next(iter(given.keys))]

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
