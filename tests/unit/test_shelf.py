"""What may be given away: the very bytes of a chunk that is in, by key and number."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage import shelf
from forestage.cache import digest, part
from forestage.cache.image import Access, Identity, Image
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import ENTRY_BYTES, Owner, boot_id
from forestage.shelf import Absent, Coming, Found, Held
from forestage.system import lock

CHUNK = 8
DATA = b"aaaaaaaabbbbbbbbcc"  # three chunks, the last one short
IMAGE = Image(Identity("/l/a", 1, len(DATA), 2, 3), Access(0, 0, 0o644))
KEY = IMAGE.key
DIGESTS = b"".join(digest.of_chunk(DATA[at : at + CHUNK]) for at in range(0, len(DATA), CHUNK))


def copying(cache: Cache, digests: bytes | None = DIGESTS, **facts: object) -> None:
    known = {"boot": boot_id(), "chunk": CHUNK, "engine": "chunks", "job": 1, "since": 0.0, **facts}
    cache.part(KEY).write_owner(Owner(pid=os.getpid(), image=IMAGE, **known))  # type: ignore[arg-type]
    cache.part(KEY).image.write_bytes(DATA)
    if digests is not None:
        cache.part(KEY).map.write_bytes(digests)


def publish(cache: Cache, chunk: int = CHUNK) -> None:
    cache.publish(Entry(KEY, IMAGE.identity, IMAGE.access, 1.0, "chunks", chunk))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "PROCESS_NAME", Path("/proc/self/comm").read_text().strip())


def read(found: Found) -> bytes:
    assert isinstance(found, Held)
    try:
        return os.pread(found.file, found.size, found.start)
    finally:
        os.close(found.file)


@pytest.mark.parametrize("published", [False, True])
def test_each_chunk_is_given_with_its_digest(cache: Cache, published: bool) -> None:
    copying(cache)
    if published:
        publish(cache)
    for number, data in enumerate((b"aaaaaaaa", b"bbbbbbbb", b"cc")):
        found = shelf.look(cache, KEY, number)
        assert isinstance(found, Held)
        assert found.told == digest.of_chunk(data).hex() == shelf.taken(found)
        assert read(found) == data


@pytest.mark.parametrize("published", [False, True])
def test_there_is_no_chunk_behind_the_last(cache: Cache, published: bool) -> None:
    copying(cache)
    if published:
        publish(cache)
    assert shelf.look(cache, KEY, 3) == Absent(beyond=True)


def test_what_is_not_here_is_absent(cache: Cache) -> None:
    assert shelf.look(cache, KEY, 0) == Absent()
    assert shelf.arrived(cache, KEY) == b""


@pytest.mark.parametrize("digests", [None, b"", bytes(48), bytes(16) + DIGESTS[16:]])
def test_a_chunk_that_a_live_copy_has_not_yet_is_coming(
    cache: Cache, alive: None, digests: bytes | None
) -> None:
    copying(cache, digests)
    assert shelf.look(cache, KEY, 0) == Coming(0, 8)


def test_a_chunk_that_a_dead_copy_has_not_is_absent(cache: Cache) -> None:
    copying(cache, bytes(48))
    assert shelf.look(cache, KEY, 0) == Absent()
    copying(cache, digests=None)
    assert shelf.look(cache, KEY, 2) == Absent()


def test_a_copy_of_another_boot_or_engine_is_not_given(cache: Cache) -> None:
    copying(cache, boot="another")
    assert shelf.look(cache, KEY, 0) == Absent()
    copying(cache, engine="rsync")
    assert shelf.look(cache, KEY, 0) == Absent()


def test_an_entry_that_was_not_copied_in_chunks_is_not_given(cache: Cache) -> None:
    copying(cache)
    publish(cache, chunk=0)
    assert shelf.look(cache, KEY, 0) == Absent()


def test_a_damaged_entry_is_not_given(cache: Cache) -> None:
    copying(cache)
    publish(cache)
    (cache.entry_dir(KEY) / "image").write_bytes(DATA[:-1])
    assert shelf.look(cache, KEY, 0) == Absent()


def test_a_copy_that_is_published_between_two_looks_is_found(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying(cache)
    real: Callable[..., Found | None] = shelf._part

    def published_now(*args: object) -> Found | None:
        publish(cache)
        return real(*args)

    monkeypatch.setattr(shelf, "_part", published_now)
    assert read(shelf.look(cache, KEY, 2)) == b"cc"


def published_so_far(cache: Cache) -> None:
    """A publishing that has come to its fsync, which may take seconds."""
    copying(cache)
    publish(cache)
    cache.entry_dir(KEY).rename(cache.part_dir(KEY))


def test_a_copy_is_given_while_it_is_made_durable(cache: Cache) -> None:
    published_so_far(cache)
    with lock.held(cache.key_lock(KEY), 0):
        assert read(shelf.look(cache, KEY, 1)) == b"bbbbbbbb"
        assert shelf.look(cache, KEY, 3) == Absent(beyond=True)


def test_what_a_crash_left_of_a_publishing_is_not_given(cache: Cache) -> None:
    published_so_far(cache)
    assert shelf.look(cache, KEY, 1) == Absent()
    (cache.part_dir(KEY) / "entry.json").write_bytes(b"{")
    with lock.held(cache.key_lock(KEY), 0):
        assert shelf.look(cache, KEY, 1) == Absent()


def test_an_open_chunk_survives_its_eviction(cache: Cache) -> None:
    copying(cache)
    publish(cache)
    found = shelf.look(cache, KEY, 1)
    cache.retire(KEY)
    cache.empty_evicted()
    assert read(found) == b"bbbbbbbb"


def test_no_file_stays_open_when_a_chunk_is_not_here(cache: Cache) -> None:
    copying(cache, bytes(48))
    gc.collect()  # what earlier tests left open must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    for number in range(4):
        shelf.look(cache, KEY, number)
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_no_digest_was_taken_none_is_told(cache: Cache) -> None:
    copying(cache, digest.UNKNOWN * 3)
    found = shelf.look(cache, KEY, 2)
    assert isinstance(found, Held)
    assert (found.told, shelf.taken(found)) == ("", digest.of_chunk(b"cc").hex())
    os.close(found.file)


def test_the_map_is_read_before_and_after_it_is_published(cache: Cache) -> None:
    copying(cache)
    assert shelf.arrived(cache, KEY) == DIGESTS
    publish(cache)
    assert shelf.arrived(cache, KEY) == DIGESTS


@given(st.lists(st.booleans(), max_size=70))
def test_the_set_of_chunks_has_a_bit_for_each_that_is_in(each: list[bool]) -> None:
    digests = b"".join(digest.UNKNOWN if one else digest.MISSING for one in each)
    assert shelf.has(digests) == sum(1 << number for number, one in enumerate(each) if one)
    assert [shelf.is_in(digests, number) for number in range(len(each))] == each
    assert not shelf.is_in(digests, len(each))


def test_a_copy_whose_process_is_hidden_lives(cache: Cache) -> None:
    """/proc with hidepid=; else each node would be told to read in the others' stead."""
    copying(cache, DIGESTS[:-ENTRY_BYTES])
    with lock.held(cache.key_lock(KEY), 60.0):
        assert shelf.look(cache, KEY, 2) == Coming(2 * CHUNK, 2)
        assert not shelf.is_blind(cache, KEY)
    assert shelf.look(cache, KEY, 2) == Absent()
    assert shelf.is_blind(cache, KEY)
