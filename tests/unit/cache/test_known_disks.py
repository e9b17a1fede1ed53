"""Which disk a cache was made on: what is another one, and what is written when."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.cache import known_disks
from forestage.cache.known_disks import CacheLocation, KnownDisks

ROOT = "/mnt/nvme/forestage"
OWN = CacheLocation(ROOT, "/mnt/nvme", "xfs 1")


@pytest.mark.parametrize(
    ("point", "file_system", "is_unmounted"),
    [
        ("/mnt/nvme", "xfs 1", False),
        ("/mnt/nvme", "xfs 2", False),  # made anew
        ("/mnt/nvme", "", False),
        (ROOT, "ext4 5", False),  # one more that is mounted for it
        ("/", "ext4 5", True),
        ("/mnt", "ext4 5", True),
        ("/mnt", "", True),
        ("/mnt", "xfs 1", False),  # the same by another mount point
    ],
)
def test_disk_counts_as_unmounted_if_the_file_system_at_the_cache_changed(
    point: str, file_system: str, is_unmounted: bool
) -> None:
    now = CacheLocation(ROOT, point, file_system)
    assert known_disks.is_unmounted(OWN, now) is is_unmounted


def test_disk_without_file_system_identity_counts_as_unmounted_at_another_mount_point() -> None:
    known = CacheLocation(ROOT, "/mnt/nvme", "")
    assert known_disks.is_unmounted(known, CacheLocation(ROOT, "/", ""))


def test_remembered_disk_replaces_only_the_disk_of_the_same_cache(tmp_path: Path) -> None:
    file = tmp_path / "lib/forestage/caches.json"
    other = CacheLocation("/data/forestage", "/data", "ext4 3")
    new = CacheLocation(ROOT, "/mnt/nvme", "xfs 2")
    assert known_disks.remember_disk(file, OWN) is None
    assert known_disks.remember_disk(file, other) is None
    assert known_disks.remember_disk(file, new) == OWN
    assert known_disks.read_known_disks(file) == KnownDisks(caches=(other, new))
    assert file.parent.stat().st_mode & 0o7777 == 0o700, "users can list no name there"
    assert file.stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("file_system", ["ext4 5", ""])
def test_root_file_system_never_replaces_the_remembered_disk_of_a_cache(
    tmp_path: Path, file_system: str
) -> None:
    file = tmp_path / "caches.json"
    known_disks.remember_disk(file, OWN)
    assert known_disks.remember_disk(file, CacheLocation(ROOT, "/", file_system)) is None
    assert known_disks.read_known_disks(file) == KnownDisks(caches=(OWN,))


def test_record_of_the_same_disk_is_rewritten_only_for_an_admin(tmp_path: Path) -> None:
    file = tmp_path / "caches.json"
    known_disks.remember_disk(file, OWN)
    before = file.stat()
    by_another_point = CacheLocation(ROOT, "/mnt", "xfs 1")
    assert known_disks.remember_disk(file, by_another_point) is None
    assert file.stat() == before
    known_disks.remember_disk(file, by_another_point, is_accepted=True)
    assert known_disks.read_known_disks(file).find_location(ROOT) == by_another_point
