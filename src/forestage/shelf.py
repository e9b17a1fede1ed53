"""What can be given away? Chunks of published entries and of copies under way, by key and number.

No path ever comes from outside: a key is 32 hex digits, a number is below the count of chunks.
"""

import contextlib
import os
from pathlib import Path
from typing import TypeAlias

import msgspec

from forestage.cache import digest
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import ENTRY_BYTES, Owner, boot_id, chunk_count
from forestage.system import lock

STEP = 1 << 20  # bytes read at a time for a digest that no map has


class Held(msgspec.Struct, frozen=True):
    """A chunk that is here: an open file, which the caller closes, and where in it, in bytes.

    The open file stays what it is when the entry is published, or evicted, in the next moment.
    """

    file: int
    start: int
    size: int
    digest: bytes

    @property
    def told(self) -> str:
        """The digest, hex; "" where none was taken when the chunk was copied."""
        return "" if self.digest == digest.UNKNOWN else self.digest.hex()


class Coming(msgspec.Struct, frozen=True):
    """A chunk of a copy under way that may arrive soon; its place in the file, in bytes."""

    start: int
    size: int


class Absent(msgspec.Struct, frozen=True):
    """Neither here nor on its way; `beyond`: the image has no chunk of that number."""

    beyond: bool = False


Found: TypeAlias = Held | Coming | Absent


class _Shape(msgspec.Struct, frozen=True):
    """An image's length, how it is cut, and whether somebody is still copying it."""

    size: int
    chunk: int
    lives: bool


def look(cache: Cache, key: str, number: int) -> Found:
    """What there is of a chunk now. Raises OSError of the cache's disk."""
    # The middle one may be published while we look: then it is found the second time.
    for published in (True, False, True):
        found = _entry(cache, key, number) if published else _part(cache, key, number)
        if found is not None:
            return found
    return Absent()


def arrived(cache: Cache, key: str) -> bytes:
    """The map of a copy under way, or of the entry that it has become; empty if there is none."""
    for directory in (cache.part_dir(key), cache.entry_dir(key)):
        with contextlib.suppress(FileNotFoundError):
            return (directory / "map").read_bytes()
    return b""


def is_blind(cache: Cache, key: str) -> bool:
    """Whether a copy here reads nothing more: its source gives errors, or its stager was killed.

    Of the latter too others must know: it answers at once that a chunk is not here, and whoever
    hoped for the chunk would ask as fast as it answers.
    """
    part = cache.part(key)
    owner = part.owner()
    return part.blind.exists() or (owner is not None and not _lives(cache, key, owner))


def is_in(digests: bytes, number: int) -> bool:
    """Pure: whether a map says that this chunk is in."""
    return any(digests[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES])


def has(digests: bytes) -> int:
    """Pure: which chunks a map says are in; bit 5 is chunk 5."""
    each = digest.split(digests)
    return int("".join("0" if one == digest.MISSING else "1" for one in reversed(each)) or "0", 2)


def taken(held: Held) -> str:
    """The digest, hex, of the bytes that are there. It takes some milliseconds."""
    running = digest.Running()
    end = held.start + held.size
    for at in range(held.start, end, STEP):
        running.add(memoryview(os.pread(held.file, min(STEP, end - at), at)))
    return running.digest().hex()


def _entry(cache: Cache, key: str, number: int) -> Found | None:
    entry = cache.read(key)
    if entry is None or not entry.chunk:
        return None
    shape = _Shape(entry.identity.size, entry.chunk, lives=False)
    return _chunk(cache.entry_dir(key), shape, number)


def _part(cache: Cache, key: str, number: int) -> Found | None:
    owner = cache.part(key).owner()
    if owner is None:
        return _publishing(cache, key, number)
    # What another boot wrote may have reached the map and not the disk.
    if owner.boot != boot_id() or owner.engine != "chunks":
        return None
    shape = _Shape(owner.image.size, owner.chunk, _lives(cache, key, owner))
    return _chunk(cache.part_dir(key), shape, number)


def _lives(cache: Cache, key: str, owner: Owner) -> bool:
    # The lock as well: where /proc hides what is others' (hidepid=), the service, which has few of
    # root's rights, does not see a stager that lives.
    return owner.lives() or not lock.is_free(cache.key_lock(key))


def _publishing(cache: Cache, key: str, number: int) -> Found | None:
    """A part that is whole and has its entry's record already; making it durable takes a while."""
    directory = cache.part_dir(key)
    try:
        entry = msgspec.json.decode((directory / "entry.json").read_bytes(), type=Entry)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
    # Without a stager it is what a crash left, perhaps in another boot.
    if not entry.chunk or lock.is_free(cache.key_lock(key)):
        return None
    return _chunk(directory, _Shape(entry.identity.size, entry.chunk, lives=False), number)


def _chunk(directory: Path, shape: _Shape, number: int) -> Found | None:
    """A chunk of an image in this directory; None where the directory has gone meanwhile."""
    if number >= chunk_count(shape.size, shape.chunk):
        return Absent(beyond=True)
    start = number * shape.chunk
    size = min(shape.chunk, shape.size - start)
    try:
        one = _map_entry(directory / "map", number)
        if one == digest.MISSING:
            return Coming(start, size) if shape.lives else Absent()
        file = os.open(directory / "image", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # A copy that stands in line has no map yet.
        return Coming(start, size) if shape.lives and directory.is_dir() else None
    return Held(file, start, size, one)


def _map_entry(path: Path, number: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, ENTRY_BYTES, number * ENTRY_BYTES).ljust(ENTRY_BYTES, b"\0")
    finally:
        os.close(file)
