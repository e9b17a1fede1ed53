"""The sum of the entries: no hook reads them to learn it, and no wrong value does harm."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fixtures import calls_of
from forestage.cache import entry_sum, evict
from forestage.cache.entry_sum import EntrySum
from forestage.cache.layout import Cache, Entry, StoredEntry
from forestage.cache.lease import LeaseDirectory
from forestage.cache.part import boot_id
from forestage.cache.source_image import SourceImage
from forestage.config import Config
from forestage.system import lock
from forestage.units import SizeOrShare

Make = Callable[..., SourceImage]
Publish = Callable[[SourceImage], Entry]

MIB = 1 << 20
ROOM_FOR_ALL = Config(
    max_size=SizeOrShare(size=1 << 50),
    min_free=SizeOrShare(size=0),
    low_watermark=SizeOrShare(size=1 << 40),
)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold the cache's disk: by statvfs(2) alone it is above every watermark."""
    full = evict.CacheSpace(0, 1 << 60, max_size=1, min_free=1, low=1, share=1)
    monkeypatch.setattr(evict, "estimate_least_space", lambda _cache, _config: full)


def total(cache: Cache) -> int:
    return sum(one.bytes for one in cache.list_entries())


def known(cache: Cache) -> int | None:
    found = entry_sum.read_sum(cache.entry_sum)
    return found.bytes if found else None


def known_data(cache: Cache) -> int | None:
    found = entry_sum.read_sum(cache.entry_sum)
    return found.data if found else None


def publish_data(cache: Cache, wanted: SourceImage) -> str:
    cache.part_dir(wanted.key).mkdir()
    cache.part(wanted.key).image.write_bytes(bytes(wanted.size))
    entry = Entry(wanted.key, wanted.identity, wanted.access, 1.0, "rsync", kind="data")
    cache.publish(entry)
    return wanted.key


def set_sum(cache: Cache, total: int) -> None:
    cache.entry_sum.write_bytes(msgspec.json.encode(EntrySum(boot_id(), total, 1)))


def limited(low: int) -> Config:
    return msgspec.structs.replace(
        ROOM_FOR_ALL, low_watermark=SizeOrShare(size=low), max_size=SizeOrShare(size=low)
    )


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "hook",
    [
        lambda cache, leases: evict.evict_to_watermark(cache, leases, ROOM_FOR_ALL),
        lambda cache, leases: evict.make_room(cache, leases, ROOM_FOR_ALL, "/lustre/b", MIB),
        lambda cache, leases: evict.make_room(
            cache, leases, ROOM_FOR_ALL, "/lustre/b", MIB, data=True
        ),
    ],
    ids=["epilog", "stager", "stager of data"],
)
def test_hook_that_evicts_nothing_makes_as_many_calls_for_10_as_for_1000_entries(
    cache: Cache, leases: LeaseDirectory, hook: Callable[[Cache, LeaseDirectory], tuple[str, ...]]
) -> None:
    counts = []
    for some in (10, 1000):
        for number in range(some):
            (cache.entries / f"{number:04}").mkdir(exist_ok=True)
        evict.recount_entries(cache)
        counts.append(calls_of(lambda: hook(cache, leases)))
    assert counts[0] == counts[1]
    assert len(list(cache.entries.iterdir())) == 1000


def test_entry_sum_stays_exact_as_entries_are_published_and_evicted(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    assert known(cache) is None
    first = publish(make_image(inode=1))
    evict.recount_entries(cache)
    assert known(cache) == total(cache) > 0
    second = publish(make_image(inode=2, size=MIB))
    assert known(cache) == total(cache)
    publish(make_image(inode=1))  # in the place of the first one
    assert known(cache) == total(cache)
    cache.evict_entry(second.key)
    cache.evict_entry(second.key)  # gone already
    assert known(cache) == total(cache) > 0
    cache.demote_to_part(first.key)
    assert known(cache) == total(cache) == 0


def test_copy_of_data_evicts_the_oldest_data_only_if_it_would_exceed_the_data_share(
    cache: Cache, leases: LeaseDirectory, make_image: Make
) -> None:
    share = msgspec.structs.replace(ROOM_FOR_ALL.data, share=SizeOrShare(size=3 * MIB))
    config = msgspec.structs.replace(ROOM_FOR_ALL, data=share)
    evict.recount_entries(cache)
    sizes = {"/lustre/a": MIB, "/lustre/b": MIB, "/lustre/c": MIB // 2}
    keys = [publish_data(cache, make_image(path=path, size=size)) for path, size in sizes.items()]
    taken = [one.bytes for one in cache.list_entries()]
    assert known_data(cache) == sum(taken) > 2 * MIB
    room = functools.partial(evict.make_room, cache, leases, config, "/lustre/d", data=True)
    assert room(3 * MIB - sum(taken)) == ()
    assert room(3 * MIB - sum(taken) + 1) == (keys[0],)
    assert known_data(cache) == sum(one.bytes for one in cache.list_entries())
    cache.demote_to_part(keys[1])
    cache.evict_entry(keys[2])
    assert known_data(cache) == 0


@pytest.mark.usefixtures("filled")
def test_entry_sum_that_is_too_high_evicts_nothing_and_is_corrected(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    publish(make_image())
    for hook in (
        lambda config: evict.evict_to_watermark(cache, leases, config),
        lambda config: evict.make_room(cache, leases, config, "/lustre/b", 0),
    ):
        set_sum(cache, 1 << 45)
        assert hook(limited(total(cache) + MIB)) == ()
        assert known(cache) == total(cache)


@pytest.mark.usefixtures("filled")
def test_entry_sum_that_is_too_low_still_keeps_min_free_and_is_corrected_by_a_recount(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    key = publish(make_image()).key
    set_sum(cache, 0)
    above = limited(total(cache) - 1)
    assert evict.evict_to_watermark(cache, leases, above) == ()
    disk = os.statvfs(cache.root)
    every_byte = SizeOrShare(size=disk.f_blocks * disk.f_frsize)
    assert evict.evict_to_watermark(
        cache, leases, msgspec.structs.replace(above, min_free=every_byte)
    ) == (key,)
    key = publish(make_image()).key
    set_sum(cache, 0)
    evict.recount_entries(cache)  # as the sweep does
    assert evict.evict_to_watermark(cache, leases, above) == (key,)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"\xff\0",
        b'{"boot":',
        msgspec.json.encode(EntrySum("another", 0, 1)),
        msgspec.json.encode(EntrySum(boot_id(), 0, 0)),
        msgspec.json.encode(EntrySum(boot_id(), -1, 1)),
        msgspec.json.encode(EntrySum(boot_id(), 0, 1, -1)),
    ],
)
def test_invalid_entry_sum_has_the_entries_read_and_counted_again(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make, left: bytes
) -> None:
    key = publish(make_image()).key
    cache.entry_sum.write_bytes(left)
    assert evict.evict_to_watermark(cache, leases, limited(total(cache) + MIB)) == ()
    assert known(cache) == total(cache)
    cache.entry_sum.write_bytes(left)
    assert evict.evict_to_watermark(cache, leases, limited(1)) == (key,)


def test_entry_sum_that_cannot_be_written_hinders_neither_eviction_nor_publishing(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    cache.entry_sum.mkdir()
    key = publish(make_image()).key
    assert evict.evict_to_watermark(cache, leases, limited(1)) == (key,)
    cache.entry_sum.rmdir()
    evict.recount_entries(cache)
    with lock.held(cache.entry_sum, 0):
        assert publish(make_image()).key == key
    assert known(cache) == 0


@pytest.mark.parametrize("counted_before", [False, True])
def test_entry_published_during_a_recount_is_in_the_entry_sum(
    cache: Cache,
    publish: Publish,
    make_image: Make,
    monkeypatch: pytest.MonkeyPatch,
    counted_before: bool,
) -> None:
    publish(make_image(inode=1))
    if counted_before:
        evict.recount_entries(cache)
    listed = Cache.list_entries
    inodes = iter(range(2, 10))

    def publishing(self: Cache, known: list[StoredEntry] | tuple[()] = ()) -> list[StoredEntry]:
        publish(make_image(inode=next(inodes)))
        found = listed(self, known)
        publish(make_image(inode=next(inodes)))
        return found

    monkeypatch.setattr(Cache, "list_entries", publishing)
    evict.recount_entries(cache)
    monkeypatch.undo()
    assert (known(cache) or 0) >= total(cache)


def test_recount_overtaken_by_a_later_recount_does_not_change_the_entry_sum(cache: Cache) -> None:
    early = entry_sum.begin_count(cache.entry_sum)
    late = entry_sum.begin_count(cache.entry_sum)
    entry_sum.end_count(cache.entry_sum, late, 100, 0)
    entry_sum.end_count(cache.entry_sum, early, 100, 0)
    assert known(cache) == 100


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "hook",
    [
        lambda cache, leases: evict.evict_to_watermark(cache, leases, limited(1)),
        lambda cache, leases: evict.make_room(
            cache, leases, limited(1 << 14), "/lustre/b", 1 << 14
        ),
        lambda cache, leases: evict.evict_for_job(cache, leases, limited(1), 1, 0, 60.0),
        lambda cache, _leases: evict.recount_entries(cache),
    ],
    ids=["epilog", "stager", "job-dir", "sweep"],
)
def test_space_lock_is_free_while_entries_are_read(
    cache: Cache,
    leases: LeaseDirectory,
    publish: Publish,
    make_image: Make,
    monkeypatch: pytest.MonkeyPatch,
    hook: Callable[[Cache, LeaseDirectory], object],
) -> None:
    for inode in range(3):
        publish(make_image(inode=inode))
    read, free = Cache._read_entry_directory, []

    def looking(self: Cache, directory: Any) -> StoredEntry:
        free.append(lock.is_free(self.space_lock))
        return read(self, directory)

    monkeypatch.setattr(Cache, "_read_entry_directory", looking)
    hook(cache, leases)
    assert free == [True] * 3


def test_eviction_respects_entries_pinned_or_published_since_the_entries_were_read(
    cache: Cache,
    leases: LeaseDirectory,
    publish: Publish,
    make_image: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [publish(make_image(inode=inode)).key for inode in range(3)]
    listed = Cache.list_entries

    def changing(self: Cache, known: list[StoredEntry] | tuple[()] = ()) -> list[StoredEntry]:
        found = listed(self, known)
        if not known:
            (cache.entry_dir(keys[0]) / "pinned").touch()
            cache.evict_entry(keys[1])
            keys.append(publish(make_image(inode=3)).key)
        return found

    monkeypatch.setattr(Cache, "list_entries", changing)
    assert set(evict.evict_to_watermark(cache, leases, limited(1))) == {keys[2], keys[3]}
    assert [one.name for one in cache.entries.iterdir()] == [keys[0]]
