from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import PartRecord
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.system import lock
from forestage.views.through import keeper_cleanup, local_image
from forestage.views.through.local_image import LocalImage

MIB = 1024 * 1024
IMAGE = SourceImage(FileIdentity("/shared/i.sqsh", 7, 2 * MIB, 1, 1), AccessRights(0, 0, 0o644))


@pytest.fixture
def readers(tmp_path: Path) -> ArrivalMap:
    """A part whose first piece is in place, and what its stager writes."""
    part = Cache(tmp_path / "cache").part(IMAGE.key)
    part.directory.mkdir(parents=True)
    part.image.write_bytes(b"a" * MIB + bytes(MIB))
    (tmp_path / "spot").mkdir()
    made = ArrivalMap(tmp_path / "spot", IMAGE.size, MIB, part.image.stat().st_ino)
    made.mark_arrived(0, MIB)
    return made


@pytest.fixture
def found(tmp_path: Path, readers: ArrivalMap) -> LocalImage:
    found = LocalImage(Cache(tmp_path / "cache"), IMAGE, tmp_path / "spot")
    found.open_latest()
    return found


def test_local_image_reads_only_pieces_marked_as_arrived(found: LocalImage) -> None:
    buffer = memoryview(bytearray(4096))
    assert found.read_into(0, buffer)
    assert bytes(buffer) == b"a" * 4096
    assert not found.read_into(MIB - 1, buffer)
    assert not found.read_into(MIB, buffer)


@pytest.mark.parametrize("change", ["forgotten", "there and back", "dropped"])
def test_bytes_are_not_used_if_their_mark_was_cleared_during_the_read(
    found: LocalImage, readers: ArrivalMap, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def there_and_back() -> None:
        readers.clear_arrived(0)
        readers.mark_arrived(0, MIB)

    changes: dict[str, Callable[[], None]] = {
        "forgotten": lambda: readers.clear_arrived(0),
        "there and back": there_and_back,
        "dropped": found.stop_using,
    }
    real = os.preadv

    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        changes[change]()
        return real(fd, into, offset)

    monkeypatch.setattr(local_image.os, "preadv", preadv)
    assert not found.read_into(0, memoryview(bytearray(4096)))


def test_arrival_marks_for_another_inode_are_not_used(
    found: LocalImage, readers: ArrivalMap, tmp_path: Path
) -> None:
    other = ArrivalMap(tmp_path / "spot", IMAGE.size, MIB, inode=1)
    other.mark_arrived(0, IMAGE.size)
    assert not found.has_bytes(0, 4096)


def test_arrival_marks_are_cleared_before_their_directory_is_deleted(
    found: LocalImage, tmp_path: Path
) -> None:
    assert found.has_bytes(0, 4096)
    keeper_cleanup.remove_directory(tmp_path / "spot")
    assert not found.has_bytes(0, 4096)
    assert not (tmp_path / "spot").exists()


@pytest.fixture
def left(found: LocalImage) -> LocalImage:
    """A part of whose stager there is nothing else."""
    owner = PartRecord(1, "boot", IMAGE, MIB, "chunks", job=7, since=0.0)
    found.cache.part(IMAGE.key).write_record(owner)
    found.cache.root.chmod(0o700)
    found.cache.prepare(require_mount=False)
    return found


def test_copy_is_abandoned_after_its_lock_was_free_at_two_checks(left: LocalImage) -> None:
    assert not left.is_abandoned()
    with lock.held(left.cache.key_lock(IMAGE.key), 0):
        assert not left.is_abandoned()
    assert not left.is_abandoned()
    assert left.is_abandoned()


@pytest.mark.parametrize("end", ["published", "dropped", "stopped"])
def test_published_dropped_or_stopped_copy_is_not_abandoned(left: LocalImage, end: str) -> None:
    if end == "published":
        left.cache.publish(Entry(IMAGE.key, IMAGE.identity, IMAGE.access, 1.0, "chunks"))
    elif end == "stopped":
        left.cache.part(IMAGE.key).mark_stopped()
    else:
        left.cache.drop_part(IMAGE.key)
    left.open_latest()
    assert [left.is_abandoned(), left.is_abandoned()] == [False, False]


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalImage:
    """An entry that is open, and gives an I/O error from now on."""
    cache = Cache(tmp_path / "cache")
    cache.prepare(require_mount=False)
    part = cache.part(IMAGE.key)
    part.directory.mkdir()
    part.image.write_bytes(bytes(IMAGE.size))
    cache.publish(Entry(IMAGE.key, IMAGE.identity, IMAGE.access, 1.0, "chunks"))
    made = LocalImage(cache, IMAGE, tmp_path / "spot")
    made.open_latest()
    assert made.is_whole

    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    return made


def test_entry_with_a_read_error_is_evicted_once(failing: LocalImage) -> None:
    assert not failing.read_into(0, memoryview(bytearray(4096)))
    assert failing.unreadable_inode
    failing.evict_unreadable()
    assert list(failing.cache.entries.iterdir()) == []
    assert not failing.read_into(0, memoryview(bytearray(4096)))
    assert not failing.unreadable_inode


def test_newer_copy_of_an_image_with_a_read_error_is_not_evicted(failing: LocalImage) -> None:
    failing.read_into(0, memoryview(bytearray(4096)))
    copy = failing.cache.image_path(IMAGE.key)
    copy.rename(copy.with_name("old"))
    copy.write_bytes(bytes(IMAGE.size))
    failing.evict_unreadable()
    assert copy.exists()
