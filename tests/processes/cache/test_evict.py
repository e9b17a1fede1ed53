"""Eviction: nothing that is leased or pinned, nothing in vain, and in the right order."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from fixtures import half
from forestage.cache import evict
from forestage.cache.layout import Cache, Entry, tree_bytes
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.part import PartRecord, boot_id
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.config import Config
from forestage.config.keys import DataSection
from forestage.errors import Declined
from forestage.system import lock
from forestage.system.as_user import User
from forestage.units import SizeOrShare

Make = Callable[..., SourceImage]
Publish = Callable[[SourceImage], Entry]

NO_LIMIT = 10**12
ALL_MAY_STAY = Config(
    max_size=SizeOrShare(size=NO_LIMIT),
    min_free=SizeOrShare(size=0),
    low_watermark=SizeOrShare(share=1.0),
)
ALL_MUST_GO = Config(max_size=SizeOrShare(size=1), min_free=SizeOrShare(size=0))


def lease(leases: LeaseDirectory, job: int, key: str) -> None:
    leases.write_lease(Lease(job, User("", 0, 0), 0.0, "/cache", (EntryUse(key),)))


def test_eviction_to_the_watermark_spares_leased_and_pinned_entries(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    keys = [publish(make_image(inode=n)).key for n in range(4)]
    lease(leases, 1, keys[0])
    (cache.entry_dir(keys[1]) / "pinned").touch()
    assert evict.evict_to_watermark(cache, leases, ALL_MAY_STAY) == ()
    assert set(evict.evict_to_watermark(cache, leases, ALL_MUST_GO)) == set(keys[2:])
    assert {path.name for path in cache.entries.iterdir()} == set(keys[:2])
    assert list(cache.evicted.iterdir()) == []


def test_eviction_plan_names_exactly_the_entries_that_eviction_to_the_watermark_evicts(
    cache: Cache,
    leases: LeaseDirectory,
    publish: Publish,
    make_image: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also what counts beside entries: parts that nobody can go on with, a disk without inodes."""
    keys = [publish(make_image(inode=n)).key for n in range(3)]
    lease(leases, 1, keys[0])
    half(cache, "older boot", "another")
    used = evict.measure_space(cache, cache.list_entries(), ALL_MAY_STAY).used
    of_part = tree_bytes(cache.part_dir("older boot"))
    assert of_part > 0
    fits_without_part = msgspec.structs.replace(
        ALL_MUST_GO, low_watermark=SizeOrShare(size=used - of_part), max_size=SizeOrShare(size=used)
    )

    def planned(config: Config) -> tuple[str, ...]:
        return evict.plan_to_watermark(cache, leases.leased_keys, config).victims

    assert planned(fits_without_part) == ()
    assert set(planned(ALL_MUST_GO)) == set(keys[1:])
    assert {path.name for path in cache.parts.iterdir()} == {"older boot"}
    assert evict.evict_to_watermark(cache, leases, fits_without_part) == ()
    monkeypatch.setattr(evict, "FILES", 1 << 62)  # more than any disk takes
    full = planned(ALL_MAY_STAY)
    assert len(full) == 1
    assert evict.evict_to_watermark(cache, leases, ALL_MAY_STAY) == full


def test_part_of_an_earlier_boot_does_not_count_for_its_users_share(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    keys = [publish(make_image(path=f"/lustre/{user}", inode=user)).key for user in (1000, 2000)]
    for at, (key, user) in enumerate(zip(keys, (1000, 2000), strict=True)):
        (cache.entry_dir(key) / "used").write_text(str(user))
        cache.record_use(key, at)
    half(cache, "dead", "another", 2000)
    sizes = [one.bytes for one in cache.list_entries()]
    config = msgspec.structs.replace(
        ALL_MAY_STAY,
        low_watermark=SizeOrShare(size=sum(sizes) - 1),
        max_user_share=SizeOrShare(size=max(sizes)),
    )
    assert evict.plan_to_watermark(cache, leases.leased_keys, config).victims == (keys[0],)
    assert evict.evict_to_watermark(cache, leases, config) == (keys[0],)


def test_evict_keys_spares_leased_and_pinned_entries(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    keys = [publish(make_image(inode=n)).key for n in range(3)]
    lease(leases, 1, keys[0])
    (cache.entry_dir(keys[1]) / "pinned").touch()
    assert evict.evict_keys(cache, leases, [*keys, "unknown"]) == (keys[2],)


def test_part_is_dropped_only_if_its_stager_is_dead_and_the_copy_cannot_be_resumed(
    cache: Cache, leases: LeaseDirectory
) -> None:
    half(cache, "alive", None)
    half(cache, "dead", None)
    half(cache, "older boot", "another")
    half(cache, "resumable", boot_id())
    with lock.held(cache.key_lock("alive"), 0):
        evict.evict_to_watermark(cache, leases, ALL_MAY_STAY)
        assert {path.name for path in cache.parts.iterdir()} == {"alive", "resumable"}
    evict.evict_to_watermark(cache, leases, ALL_MAY_STAY)
    assert {path.name for path in cache.parts.iterdir()} == {"resumable"}


def test_make_room_drops_an_unfinished_part_before_it_evicts_an_entry(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    key = publish(make_image()).key
    half(cache, "mine", boot_id())
    half(cache, "left", boot_id())
    (cache.part("left").directory / "big").write_bytes(bytes(1 << 20))
    used = evict.measure_space(cache, cache.list_entries(), ALL_MAY_STAY).used
    tight = Config(max_size=SizeOrShare(size=used), min_free=SizeOrShare(size=0))
    with lock.held(cache.key_lock("mine"), 0):
        assert evict.make_room(cache, leases, tight, "/lustre/b", 0) == ()
        assert cache.part_dir("left").exists()
        assert evict.make_room(cache, leases, tight, "/lustre/b", 1 << 20) == ()
        assert [path.name for path in cache.parts.iterdir()] == ["mine"]
    assert cache.find_entry_by_key(key) is not None


def half_tree(cache: Cache, key: str) -> int:
    """A part of a directory; the bytes that it takes on the disk."""
    part = cache.part(key)
    part.directory.mkdir()
    part.image.write_bytes(bytes(1 << 20))
    wanted = SourceImage(FileIdentity("/a", 1, 8, 1, 1), AccessRights(0, 0, 0o644), "data")
    part.write_record(PartRecord(1, boot_id(), wanted, 4, "chunks", 7, 1.0))
    return tree_bytes(part.directory)


def test_copies_of_data_under_way_count_against_the_share_of_data(
    cache: Cache, leases: LeaseDirectory
) -> None:
    half(cache, "image", boot_id())
    size = half_tree(cache, "tree")
    assert evict.measure_space(cache, [], ALL_MAY_STAY).data_under_way == size
    config = msgspec.structs.replace(
        ALL_MAY_STAY, data=DataSection(share=SizeOrShare(size=2 << 20))
    )
    with lock.held(cache.key_lock("tree"), 0):
        evict.make_room(cache, leases, config, "/b", (2 << 20) - size, data=True)
        with pytest.raises(Declined, match="needs"):
            evict.make_room(cache, leases, config, "/b", 2 << 20, data=True)
    # What nobody copies any more is in no other directory's way; an image's part is not in it.
    evict.make_room(cache, leases, config, "/b", 2 << 20, data=True)
    assert {path.name for path in cache.parts.iterdir()} == {"image"}
