"""Chunks that this node can give: of published entries and of copies under way.

A chunk is named by its key (32 hex digits) and its number; no path ever comes from outside. Nothing
is locked: a copy writes a chunk's digest into the map after its bytes, and an open file stays what
it is when its entry is published, or evicted, in the next moment. A part counts only if this boot
wrote it.
"""

import asyncio
import contextlib
import io
import os
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

import msgspec

from forestage.cache import digest
from forestage.cache.layout import Cache, Entry, open_copy
from forestage.cache.part import ENTRY_BYTES, boot_id, chunk_count
from forestage.features.peers import chunk_readers
from forestage.system import files, lock, records

POLL = 0.02  # seconds between two looks at the map of a copy, for all who wait for its chunks
_IS_IN = b"0" + b"1" * 255  # a byte's digit


class PresentChunk(msgspec.Struct, frozen=True):
    """A chunk that is here: an open file, which the caller closes, and its place in bytes."""

    file: io.FileIO
    start: int
    size: int
    digest: bytes


class PendingChunk(msgspec.Struct, frozen=True):
    """A chunk of a copy under way that has not arrived yet; its place in the file, in bytes."""

    start: int
    size: int


class AbsentChunk(msgspec.Struct, frozen=True):
    """A chunk that is neither here nor being copied; `is_beyond_end` if the image has fewer."""

    is_beyond_end: bool = False


ChunkState: TypeAlias = PresentChunk | PendingChunk | AbsentChunk


class LocalCopyState(msgspec.Struct, frozen=True):
    """A copy's map, empty without one, and who read what of it; None: no peer had a part in it."""

    digests: bytes = b""
    read_by: chunk_readers.ChunkReaders | None = None
    is_whole: bool = False

    def chunks_here(self, number: int | None = None) -> int:
        """The chunks that are in, bit 5 is chunk 5; of one alone it takes no time."""
        if number is None:
            return parse_chunk_set(self.digests)
        return is_chunk_in(self.digests, number) << number

    def chunks_for_other_jobs(self, here: int) -> int:
        """Of these chunks, those that nodes of other jobs may have (chunk_readers.py)."""
        return (
            here
            if self.read_by is None
            else self.read_by.chunks_for_other_jobs(here, self.is_whole)
        )


def locate_chunk(cache: Cache, key: str, number: int) -> ChunkState:
    """The chunk as it is now. Raises OSError of the cache's disk."""
    # A part may be published between the first two looks: then the third one finds the entry.
    for published in (True, False, True):
        found = (
            _locate_in_entry(cache, key, number)
            if published
            else _locate_in_part(cache, key, number)
        )
        if found is not None:
            return found
    return AbsentChunk()


def read_map(cache: Cache, key: str) -> bytes:
    """The map of a copy under way, or of the entry that it has become; empty without either."""
    for directory in (cache.part_dir(key), cache.entry_dir(key)):
        with contextlib.suppress(FileNotFoundError):
            return files.read_file(directory / "map")
    return b""


def read_copy_state(cache: Cache, key: str) -> LocalCopyState:
    """What is known of a copy under way, or of the entry that it has become, at this moment."""
    for directory, is_whole in ((cache.part_dir(key), False), (cache.entry_dir(key), True)):
        with contextlib.suppress(FileNotFoundError):
            # The map first: what is noted later of a chunk is true of this one as well.
            digests = files.read_file(directory / "map")
            if digests.startswith(digest.UNKNOWN):  # nobody could prove what came
                return LocalCopyState()
            noted = chunk_readers.find_chunk_readers(directory)
            if noted is not None or (directory / "map").exists():
                return LocalCopyState(digests, noted, is_whole)
            # It has been published, with its note.
    return LocalCopyState()


def has_source_failed(cache: Cache, key: str) -> bool:
    """Whether a copy here reads nothing more: its source gives errors, or its stager was killed.

    The latter counts as well: the service answers at once that a chunk is not here, and a peer that
    still expects the chunk from this node would ask as fast as it answers.
    """
    part = cache.part(key)
    owner = part.find_record()
    return part.source_failed.exists() or (owner is not None and not _is_being_copied(cache, key))


def is_chunk_in(digests: bytes, number: int) -> bool:
    """Pure: whether a map says that this chunk is in."""
    return any(digests[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES])


def parse_chunk_set(digests: bytes) -> int:
    """Pure: the chunks that a map says are in; bit 5 is chunk 5.

    Each response says it, so no Python runs for each chunk.
    """
    columns = (int.from_bytes(digests[at::ENTRY_BYTES], "little") for at in range(ENTRY_BYTES))
    any_byte = reduce(or_, columns).to_bytes(-(-len(digests) // ENTRY_BYTES), "big")
    return int(any_byte.translate(_IS_IN) or b"0", 2)


def _locate_in_entry(cache: Cache, key: str, number: int) -> ChunkState | None:
    entry = cache.find_entry_by_key(key)
    if entry is None or not entry.chunk:
        return None
    return _locate_in_directory(cache.entry_dir(key), number, entry.identity.size, entry.chunk)


def _locate_in_part(cache: Cache, key: str, number: int) -> ChunkState | None:
    owner = cache.part(key).find_record()
    if owner is None:
        return _locate_while_publishing(cache, key, number)
    # What another boot wrote may have reached the map and not the disk.
    if owner.boot != boot_id() or owner.engine != "chunks":
        return None
    is_copied = _is_being_copied(cache, key)
    return _locate_in_directory(
        cache.part_dir(key), number, owner.image.size, owner.chunk, is_copied
    )


def _is_being_copied(cache: Cache, key: str) -> bool:
    return not lock.is_free(cache.key_lock(key))


def _locate_while_publishing(cache: Cache, key: str, number: int) -> ChunkState | None:
    """A chunk of a part that is complete and being published; making it durable takes a while."""
    directory = cache.part_dir(key)
    entry = records.find(directory / "entry.json", Entry)
    # Without a stager it is what a crash left, perhaps in another boot.
    if entry is None or not entry.chunk or lock.is_free(cache.key_lock(key)):
        return None
    return _locate_in_directory(directory, number, entry.identity.size, entry.chunk)


def _locate_in_directory(
    directory: Path, number: int, image_size: int, chunk: int, is_copied: bool = False
) -> ChunkState | None:
    """A chunk of the image in this directory; None where the directory has gone meanwhile."""
    if number >= chunk_count(image_size, chunk):
        return AbsentChunk(is_beyond_end=True)
    start = number * chunk
    size = min(chunk, image_size - start)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with files.open_descriptor(directory / "map", flags) as digests:
            noted = os.pread(digests, ENTRY_BYTES, number * ENTRY_BYTES)
        if noted == digest.UNKNOWN:
            return AbsentChunk()
        if not any(noted):
            return PendingChunk(start, size) if is_copied else AbsentChunk()
        return PresentChunk(open_copy(directory / "image"), start, size, noted)
    except BlockingIOError:  # a lease of its owner's: one event loop must not wait for that
        return AbsentChunk()
    except FileNotFoundError:
        # A copy that is queued has no map yet.
        return PendingChunk(start, size) if is_copied and directory.is_dir() else None


class ChunkArrivalPoller:
    """Waiting for chunks of copies under way: one poll of each map for all who wait."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # Kept by those who wait.
        self._events: WeakValueDictionary[tuple[str, int], asyncio.Event] = WeakValueDictionary()
        self._polls: asyncio.Task[None] | None = None

    async def wait_for_chunk(self, key: str, number: int, seconds: float) -> None:
        """Returns when the chunk is in, or after `seconds`."""
        arrived = self._events.setdefault((key, number), asyncio.Event())
        if self._polls is None or self._polls.done():
            self._polls = asyncio.create_task(self._poll_maps())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(arrived.wait(), max(0.0, seconds))

    def wake_waiters(self) -> None:
        """Wakes all who wait, because the service is being stopped."""
        for arrived in self._events.values():
            arrived.set()

    async def _poll_maps(self) -> None:
        while self._events:
            await asyncio.sleep(POLL)
            for key in {key for key, _ in self._events}:
                self._wake_arrived(key)

    def _wake_arrived(self, key: str) -> None:
        with contextlib.suppress(OSError):  # those who wait will meet the error themselves
            digests = read_map(self._cache, key)
            for (other, number), arrived in self._events.items():
                if other == key and is_chunk_in(digests, number):
                    arrived.set()
