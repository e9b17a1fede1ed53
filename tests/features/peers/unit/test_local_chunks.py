"""Chunks that a node can give: the very bytes of a chunk that is in, by key and number."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.cache import digest
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import ENTRY_BYTES, PartRecord, boot_id
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.features.peers import chunk_readers, local_chunks
from forestage.features.peers.local_chunks import (
    AbsentChunk,
    ChunkArrivalPoller,
    ChunkState,
    PendingChunk,
    PresentChunk,
)
from forestage.system import lock

CHUNK = 8
DATA = b"aaaaaaaabbbbbbbbcc"  # three chunks, the last one short
IMAGE = SourceImage(FileIdentity("/l/a", 1, len(DATA), 2, 3), AccessRights(0, 0, 0o644))
KEY = IMAGE.key
DIGESTS = b"".join(digest.digest_chunk(DATA[at : at + CHUNK]) for at in range(0, len(DATA), CHUNK))


def copying(cache: Cache, digests: bytes | None = DIGESTS, **facts: object) -> None:
    known = {"boot": boot_id(), "chunk": CHUNK, "engine": "chunks", "job": 1, "since": 0.0, **facts}
    cache.part(KEY).write_record(PartRecord(pid=os.getpid(), image=IMAGE, **known))  # type: ignore[arg-type]
    cache.part(KEY).image.write_bytes(DATA)
    if digests is not None:
        cache.part(KEY).map.write_bytes(digests)


def publish(cache: Cache, chunk: int = CHUNK) -> None:
    cache.publish(Entry(KEY, IMAGE.identity, IMAGE.access, 1.0, "chunks", chunk))


@pytest.fixture
def alive(cache: Cache) -> Iterator[None]:
    with lock.held(cache.key_lock(KEY), 60.0):
        yield


def read(found: ChunkState) -> bytes:
    assert isinstance(found, PresentChunk)
    with found.file as file:
        return os.pread(file.fileno(), found.size, found.start)


def test_local_chunk_without_a_digest_is_absent(cache: Cache) -> None:
    copying(cache, digest.UNKNOWN * 3)
    publish(cache)
    assert local_chunks.locate_chunk(cache, KEY, 1) == AbsentChunk()
    assert local_chunks.read_copy_state(cache, KEY) == local_chunks.LocalCopyState()


@pytest.mark.parametrize("published", [False, True])
def test_local_chunk_of_an_entry_or_part_is_found_with_its_digest(
    cache: Cache, published: bool
) -> None:
    copying(cache)
    if published:
        publish(cache)
    for number, data in enumerate((b"aaaaaaaa", b"bbbbbbbb", b"cc")):
        found = local_chunks.locate_chunk(cache, KEY, number)
        assert isinstance(found, PresentChunk)
        assert found.digest == digest.digest_chunk(data)
        assert read(found) == data
    assert local_chunks.locate_chunk(cache, KEY, 3) == AbsentChunk(is_beyond_end=True)
    assert local_chunks.read_map(cache, KEY) == DIGESTS


@pytest.mark.parametrize("digests", [None, b"", bytes(48), bytes(16) + DIGESTS[16:]])
def test_missing_chunk_of_a_running_copy_is_pending(
    cache: Cache, alive: None, digests: bytes | None
) -> None:
    copying(cache, digests)
    assert local_chunks.locate_chunk(cache, KEY, 0) == PendingChunk(0, 8)


def entry(cache: Cache, chunk: int = CHUNK, data: bytes = DATA) -> None:
    copying(cache)
    publish(cache, chunk)
    (cache.entry_dir(KEY) / "image").write_bytes(data)


ABSENT: dict[str, Callable[[Cache], None]] = {
    "nothing": lambda cache: None,
    "dead copy": lambda cache: copying(cache, bytes(48)),
    "dead copy without a map": lambda cache: copying(cache, digests=None),
    "copy of another boot": lambda cache: copying(cache, boot="another"),
    "copy by another engine": lambda cache: copying(cache, engine="rsync"),
    "entry without chunks": lambda cache: entry(cache, chunk=0),
    "damaged entry": lambda cache: entry(cache, data=DATA[:-1]),
}


@pytest.mark.parametrize("left", ABSENT)
def test_local_chunk_that_cannot_be_given_is_absent_and_leaves_no_file_open(
    cache: Cache, left: str
) -> None:
    ABSENT[left](cache)
    gc.collect()  # what earlier tests left open must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    assert local_chunks.locate_chunk(cache, KEY, 0) == AbsentChunk()
    assert len(os.listdir("/proc/self/fd")) == before


def test_local_chunk_is_found_if_its_copy_is_published_during_the_search(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying(cache)
    real: Callable[..., ChunkState | None] = local_chunks._locate_in_part

    def published_now(*args: object) -> ChunkState | None:
        publish(cache)
        return real(*args)

    monkeypatch.setattr(local_chunks, "_locate_in_part", published_now)
    assert read(local_chunks.locate_chunk(cache, KEY, 2)) == b"cc"


def published_so_far(cache: Cache) -> None:
    """A publishing that has come to its fsync, which may take seconds."""
    copying(cache)
    publish(cache)
    cache.entry_dir(KEY).rename(cache.part_dir(KEY))


def test_local_chunk_is_found_while_its_copy_is_flushed_for_publishing(cache: Cache) -> None:
    published_so_far(cache)
    with lock.held(cache.key_lock(KEY), 0):
        assert read(local_chunks.locate_chunk(cache, KEY, 1)) == b"bbbbbbbb"
        assert local_chunks.locate_chunk(cache, KEY, 3) == AbsentChunk(is_beyond_end=True)


def test_local_chunk_is_absent_after_a_crash_during_publishing(cache: Cache) -> None:
    published_so_far(cache)
    assert local_chunks.locate_chunk(cache, KEY, 1) == AbsentChunk()
    (cache.part_dir(KEY) / "entry.json").write_bytes(b"{")
    with lock.held(cache.key_lock(KEY), 0):
        assert local_chunks.locate_chunk(cache, KEY, 1) == AbsentChunk()


@given(st.lists(st.integers(-1, ENTRY_BYTES - 1), max_size=70))
def test_chunk_set_has_a_bit_for_each_chunk_with_a_digest(bytes_set: list[int]) -> None:
    """Whichever byte of its digest is the one that is not zero."""
    each = [at >= 0 for at in bytes_set]
    digests = b"".join(bytes(byte == at for byte in range(ENTRY_BYTES)) for at in bytes_set)
    assert local_chunks.parse_chunk_set(digests) == sum(
        1 << number for number, one in enumerate(each) if one
    )
    assert [local_chunks.is_chunk_in(digests, number) for number in range(len(each))] == each
    assert not local_chunks.is_chunk_in(digests, len(each))


def test_missing_chunk_is_pending_only_while_the_copys_key_is_locked(cache: Cache) -> None:
    """Else each node would be told to read in the others' stead."""
    copying(cache, DIGESTS[:-ENTRY_BYTES])
    with lock.held(cache.key_lock(KEY), 60.0):
        assert local_chunks.locate_chunk(cache, KEY, 2) == PendingChunk(2 * CHUNK, 2)
        assert not local_chunks.has_source_failed(cache, KEY)
    assert local_chunks.locate_chunk(cache, KEY, 2) == AbsentChunk()
    assert local_chunks.has_source_failed(cache, KEY)


def test_fifo_in_place_of_a_map_does_not_block_reading_the_map(cache: Cache) -> None:
    copying(cache, None)
    os.mkfifo(cache.part(KEY).map)
    assert local_chunks.read_map(cache, KEY) == b""
    assert local_chunks.read_copy_state(cache, KEY).digests == b""
    with pytest.raises(OSError, match="seek"):
        local_chunks.locate_chunk(cache, KEY, 0)


def note_arrived(cache: Cache, *each: bool) -> None:
    cache.part_dir("k").mkdir(exist_ok=True)
    digests = (digest.digest_chunk(b"x") if one else digest.MISSING for one in each)
    cache.part("k").map.write_bytes(b"".join(digests))


def test_chunk_arrival_wakes_only_the_waiters_for_that_chunk(cache: Cache) -> None:
    note_arrived(cache, False, False)

    async def scene() -> list[bool]:
        arrivals = ChunkArrivalPoller(cache)
        waits = [
            asyncio.create_task(arrivals.wait_for_chunk("k", number, 600.0)) for number in (0, 1, 1)
        ]
        await asyncio.sleep(0.05)
        assert not any(wait.done() for wait in waits)
        note_arrived(cache, False, True)
        await asyncio.gather(*waits[1:])
        seen = [wait.done() for wait in waits]
        note_arrived(cache, True, True)
        await waits[0]
        return seen

    assert asyncio.run(scene()) == [False, True, True]


def test_waiters_for_chunks_share_one_poll_that_ends_with_the_last_waiter(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def read_map(*_: object) -> bytes:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise OSError(5, "EIO")
        return digest.digest_chunk(b"x") if looks == 3 else b""

    monkeypatch.setattr(local_chunks, "read_map", read_map)

    async def scene() -> None:
        arrivals = ChunkArrivalPoller(cache)
        await asyncio.gather(*(arrivals.wait_for_chunk("k", 0, 600.0) for _ in range(100)))
        assert looks == 3
        await arrivals.wait_for_chunk("k", 1, 0.05)
        await asyncio.sleep(5 * local_chunks.POLL)
        before = looks
        await asyncio.sleep(5 * local_chunks.POLL)
        assert looks == before

    asyncio.run(scene())


def test_copy_published_during_the_search_gives_other_jobs_only_permitted_chunks(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note has moved with it: that none is there any more does not mean that none was."""
    part = cache.part(KEY)
    part.directory.mkdir(parents=True)
    part.map.write_bytes(b"m" * 2 * ENTRY_BYTES)
    noted = chunk_readers.ChunkReaders({"n1": "1", "n9": "2"}, "2")
    (part.directory / chunk_readers.NAME).write_bytes(msgspec.json.encode(noted))
    real = chunk_readers.find_chunk_readers

    def read(directory: Path) -> chunk_readers.ChunkReaders | None:
        if part.directory.exists():
            cache.entries.mkdir(exist_ok=True)
            part.directory.rename(cache.entry_dir(KEY))
        return real(directory)

    monkeypatch.setattr(chunk_readers, "find_chunk_readers", read)
    known = local_chunks.read_copy_state(cache, KEY)
    assert [known.chunks_here(number) for number in (0, 1, 2, None)] == [0b01, 0b10, 0, 0b11]
    assert known.chunks_for_other_jobs(known.chunks_here()) == 0b01
    assert known.read_by is not None
    assert known.read_by.find_reader(1) == "n9"


def test_end_of_the_peer_service_wakes_all_waiters_for_chunks(cache: Cache) -> None:
    async def scene() -> None:
        arrivals = ChunkArrivalPoller(cache)
        waits = [
            asyncio.create_task(arrivals.wait_for_chunk("k", number, 600.0)) for number in range(3)
        ]
        await asyncio.sleep(0)
        arrivals.wake_waiters()
        await asyncio.gather(*waits)

    asyncio.run(scene())
