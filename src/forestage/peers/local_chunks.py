"""Chunks that this node can give: of published entries and of copies under way.

A chunk is named by its key (32 hex digits) and its number; no path ever comes from outside. Nothing
is locked: a copy writes a chunk's digest into the map after its bytes, and an open file stays what
it is when its entry is published, or evicted, in the next moment. A part counts only if this boot
wrote it.
"""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TypeAlias

import msgspec

from forestage.cache import digest
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import ENTRY_BYTES, Owner, boot_id, chunk_count
from forestage.system import lock

POLL = 0.02  # seconds between two looks at the map of a copy, for all who wait for its chunks
STEP = 1 << 20  # bytes read at a time for a digest that no map has


class Present(msgspec.Struct, frozen=True):
    """A chunk that is here: an open file, which the caller closes, and its place in bytes."""

    file: int
    start: int
    size: int
    digest: bytes

    @property
    def digest_hex(self) -> str:
        """The digest; "" where none was taken when the chunk was copied."""
        return "" if self.digest == digest.UNKNOWN else self.digest.hex()


class Pending(msgspec.Struct, frozen=True):
    """A chunk of a copy under way that has not arrived yet; its place in the file, in bytes."""

    start: int
    size: int


class Absent(msgspec.Struct, frozen=True):
    """A chunk that is neither here nor being copied. `beyond`: the image has fewer chunks."""

    beyond: bool = False


Found: TypeAlias = Present | Pending | Absent


class _Shape(msgspec.Struct, frozen=True):
    """An image's length, its chunk size, and whether a stager still copies it."""

    size: int
    chunk: int
    is_copied: bool


def find(cache: Cache, key: str, number: int) -> Found:
    """The chunk as it is now. Raises OSError of the cache's disk."""
    # A part may be published between the first two looks: then the third one finds the entry.
    for published in (True, False, True):
        found = _entry(cache, key, number) if published else _part(cache, key, number)
        if found is not None:
            return found
    return Absent()


def read_map(cache: Cache, key: str) -> bytes:
    """The map of a copy under way, or of the entry that it has become; empty without either."""
    for directory in (cache.part_dir(key), cache.entry_dir(key)):
        with contextlib.suppress(FileNotFoundError):
            return (directory / "map").read_bytes()
    return b""


def source_failed(cache: Cache, key: str) -> bool:
    """Whether a copy here reads nothing more: its source gives errors, or its stager was killed.

    The latter counts as well: the service answers at once that a chunk is not here, and a peer that
    still expects the chunk from this node would ask as fast as it answers.
    """
    part = cache.part(key)
    owner = part.owner()
    return part.source_failed.exists() or (owner is not None and not _is_copied(cache, key, owner))


def is_in(digests: bytes, number: int) -> bool:
    """Pure: whether a map says that this chunk is in."""
    return any(digests[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES])


def chunks_in(digests: bytes) -> int:
    """Pure: the chunks that a map says are in; bit 5 is chunk 5."""
    each = digest.split(digests)
    return int("".join("0" if one == digest.MISSING else "1" for one in reversed(each)) or "0", 2)


def take_digest(found: Present) -> str:
    """The digest, hex, of the chunk's bytes, read now; some milliseconds."""
    running = digest.Running()
    end = found.start + found.size
    for at in range(found.start, end, STEP):
        running.add(memoryview(os.pread(found.file, min(STEP, end - at), at)))
    return running.digest().hex()


def _entry(cache: Cache, key: str, number: int) -> Found | None:
    entry = cache.read(key)
    if entry is None or not entry.chunk:
        return None
    shape = _Shape(entry.identity.size, entry.chunk, is_copied=False)
    return _chunk(cache.entry_dir(key), shape, number)


def _part(cache: Cache, key: str, number: int) -> Found | None:
    owner = cache.part(key).owner()
    if owner is None:
        return _publishing(cache, key, number)
    # What another boot wrote may have reached the map and not the disk.
    if owner.boot != boot_id() or owner.engine != "chunks":
        return None
    shape = _Shape(owner.image.size, owner.chunk, _is_copied(cache, key, owner))
    return _chunk(cache.part_dir(key), shape, number)


def _is_copied(cache: Cache, key: str, owner: Owner) -> bool:
    # The lock as well: the service has few of root's capabilities, so where /proc is mounted with
    # hidepid= it does not see a stager that lives.
    return owner.lives() or not lock.is_free(cache.key_lock(key))


def _publishing(cache: Cache, key: str, number: int) -> Found | None:
    """A chunk of a part that is complete and being published; making it durable takes a while."""
    directory = cache.part_dir(key)
    try:
        entry = msgspec.json.decode((directory / "entry.json").read_bytes(), type=Entry)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
    # Without a stager it is what a crash left, perhaps in another boot.
    if not entry.chunk or lock.is_free(cache.key_lock(key)):
        return None
    return _chunk(directory, _Shape(entry.identity.size, entry.chunk, is_copied=False), number)


def _chunk(directory: Path, shape: _Shape, number: int) -> Found | None:
    """A chunk of the image in this directory; None where the directory has gone meanwhile."""
    if number >= chunk_count(shape.size, shape.chunk):
        return Absent(beyond=True)
    start = number * shape.chunk
    size = min(shape.chunk, shape.size - start)
    try:
        noted = _map_entry(directory / "map", number)
        if noted == digest.MISSING:
            return Pending(start, size) if shape.is_copied else Absent()
        file = os.open(directory / "image", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # A copy that is queued has no map yet.
        return Pending(start, size) if shape.is_copied and directory.is_dir() else None
    return Present(file, start, size, noted)


def _map_entry(path: Path, number: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, ENTRY_BYTES, number * ENTRY_BYTES).ljust(ENTRY_BYTES, b"\0")
    finally:
        os.close(file)


class Arrivals:
    """Waiting for chunks of copies under way: one poll of each map for all who wait."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._waiting: dict[str, dict[int, list[asyncio.Future[None]]]] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}

    async def wait(self, key: str, number: int, seconds: float) -> None:
        """Returns when the chunk is in, or after `seconds`."""
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, {}).setdefault(number, []).append(arrival)
        if key not in self._polls:
            self._polls[key] = asyncio.create_task(self._poll(key))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(arrival, max(0.0, seconds))

    def end(self) -> None:
        """Wakes all who wait, because the service is being stopped."""
        for waiting in self._waiting.values():
            for arrivals in waiting.values():
                _wake(arrivals)

    async def _poll(self, key: str) -> None:
        waiting = self._waiting[key]
        try:
            while waiting:
                await asyncio.sleep(POLL)
                with contextlib.suppress(OSError):  # those who wait will meet the error themselves
                    digests = read_map(self._cache, key)
                    for number in waiting:
                        if is_in(digests, number):
                            _wake(waiting[number])
                for number, arrivals in list(waiting.items()):
                    if all(arrival.done() for arrival in arrivals):
                        del waiting[number]
        finally:
            del self._waiting[key], self._polls[key]
            for arrivals in waiting.values():
                _wake(arrivals)


def _wake(arrivals: list[asyncio.Future[None]]) -> None:
    for arrival in arrivals:
        if not arrival.done():  # else its time was over
            arrival.set_result(None)
