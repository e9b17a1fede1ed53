"""Which mounts are binds of ours, whatever is configured: tables of what the kernel shows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from forestage.bind import origins
from forestage.bind.origins import CacheOrigin, KnownOrigins
from forestage.cache.layout import Cache
from forestage.system.mounts import BindOrigin, MountInfo

HERE, EARLIER = "/mnt/nvme/forestage", "/scratch/forestage"


def bound(number: int, device: str, root: str) -> MountInfo:
    return MountInfo(number, 1, device, root, f"/lustre/{number}")


@pytest.mark.parametrize(
    "inside",
    ["entries/0a/map", "entries/image", "jobs/7.0/disk", "looks/0a", "image", "entries/0a/image/x"],
)
def test_mount_of_a_cache_file_other_than_an_entrys_image_is_no_redirect(inside: str) -> None:
    table = [bound(2, "259:1", f"/forestage/{inside}")]
    assert origins.list_binds(table, [CacheOrigin(HERE, BindOrigin("259:1", "/forestage/"))]) == []


def test_bind_belongs_to_the_innermost_cache_with_matching_directory_and_device() -> None:
    inner = CacheOrigin(f"{HERE}/inner", BindOrigin("259:1", "/forestage/inner/"))
    outer = CacheOrigin(HERE, BindOrigin("259:1", "/forestage/"))
    table = [
        bound(2, "259:1", "/forestage/inner/entries/0a/image"),
        bound(3, "259:1", "/forestage/entries/0b/image"),
        bound(4, "259:2", "/forestage/entries/0c/image"),
    ]
    found = origins.list_binds(table, [outer, inner])
    assert [(one.mount.id, one.key, one.cache) for one in found] == [
        (2, "0a", inner.root),
        (3, "0b", outer.root),
    ]


@pytest.mark.parametrize(
    ("device", "mounted", "counts"),
    [
        ("259:1", True, True),
        ("259:1", False, True),  # what other namespaces have of a disk is ours still
        ("0:40", True, True),
        ("0:40", False, False),
    ],
)
def test_bind_of_an_earlier_cache_counts_by_device_number_unless_that_may_be_reused(
    cache: Cache, device: str, mounted: bool, counts: bool
) -> None:
    """A user's tmpfs, in a namespace of theirs, may get the number of a btrfs that is gone."""
    cache = Cache(Path(HERE), cache.claims)
    here = EARLIER.removeprefix("/scratch") + "/"
    cache.claims.joinpath(origins.FILE).write_bytes(
        msgspec.json.encode(KnownOrigins({EARLIER: (BindOrigin(device, here),)}))
    )
    table = [MountInfo(1, 0, "8:1", "/", "/")]
    table += [MountInfo(2, 1, device, "/", "/scratch")] if mounted else []
    found = origins.list_binds(
        [bound(9, device, f"{here}entries/0a/image")], origins.list_origins(cache, table)
    )
    assert [one.cache for one in found] == [EARLIER] * counts


def test_damaged_record_of_cache_origins_names_no_earlier_cache(cache: Cache) -> None:
    (cache.claims / origins.FILE).write_text("[1]")
    table = [MountInfo(1, 0, "8:1", "/", "/")]
    (only,) = origins.list_origins(Cache(Path(HERE), cache.claims), table)
    assert only == CacheOrigin(HERE, BindOrigin("8:1", f"{HERE}/"))
