"""The hot map: kept where it says something, handed to the image that supersedes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from forestage.cache import hot
from forestage.cache.image import Access, Identity, Image
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import HOT_PIECE

SIZE = 40 * HOT_PIECE
OLD = Image(Identity("/lustre/a.sqsh", 1, SIZE, 1, 1), Access(0, 0, 0o644))
NEW = Image(Identity("/lustre/a.sqsh", 2, SIZE, 2, 2), Access(0, 0, 0o644))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Has an entry of OLD, and a part of NEW."""
    cache = Cache(tmp_path / "cache")
    cache.prepare(require_mount=False)
    stored(cache, OLD, 1.0)
    cache.part(NEW.key).directory.mkdir(parents=True)
    return cache


def stored(cache: Cache, image: Image, created: float) -> None:
    directory = cache.entry_dir(image.key)
    directory.mkdir(parents=True)
    entry = Entry(image.key, image.identity, image.access, created, "chunks")
    (directory / "entry.json").write_bytes(msgspec.json.encode(entry))
    with (directory / "image").open("wb") as file:
        file.truncate(image.size)


@pytest.mark.parametrize(("count", "kept"), [(0, False), (1, True), (10, True), (11, False)])
def test_map_of_few_pieces_is_kept_and_others_are_not(cache: Cache, count: int, kept: bool) -> None:
    hot.keep(cache, OLD, set(range(count)))
    assert (cache.entry_dir(OLD.key) / "hot").exists() == kept


def test_map_of_a_copy_under_way_is_kept_with_its_part(cache: Cache) -> None:
    hot.keep(cache, NEW, {3, 17})
    assert cache.part(NEW.key).hot_chunks(2 * HOT_PIECE) == [1, 8]


def test_map_of_an_image_that_has_gone_is_not_kept(cache: Cache) -> None:
    cache.drop_part(NEW.key)
    hot.keep(cache, NEW, {3})
    assert not cache.part_dir(NEW.key).exists()


def test_superseding_image_begins_with_the_map_of_the_newest(cache: Cache) -> None:
    newer = msgspec.structs.replace(OLD.identity, inode=7)
    stored(cache, Image(newer, OLD.access), 5.0)
    hot.keep(cache, OLD, {1})
    hot.keep(cache, Image(newer, OLD.access), {2})
    hot.inherit(cache, NEW)
    assert cache.part(NEW.key).hot_chunks(HOT_PIECE) == [2]


@pytest.mark.parametrize("change", [{"path": "/lustre/b.sqsh"}, {"size": 2 * SIZE}])
def test_image_of_another_path_or_size_takes_no_map_over(
    cache: Cache, change: dict[str, object]
) -> None:
    hot.keep(cache, OLD, {1})
    other = Image(msgspec.structs.replace(NEW.identity, **change), NEW.access)
    cache.part(other.key).directory.mkdir(parents=True)
    hot.inherit(cache, other)
    assert cache.part(other.key).hot_chunks(HOT_PIECE) == []


def test_copy_that_goes_on_keeps_its_own_map(cache: Cache) -> None:
    hot.keep(cache, OLD, {1})
    hot.keep(cache, NEW, {2})
    hot.inherit(cache, NEW)
    assert cache.part(NEW.key).hot_chunks(HOT_PIECE) == [2]


def test_hot_pieces_of_an_entry_are_read_ahead(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def advise(fd: int, start: int, length: int, advice: int) -> None:
        assert (advice, os.fstat(fd).st_size) == (os.POSIX_FADV_WILLNEED, SIZE)
        asked.append((start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    hot.preload(cache, OLD.key)  # has no map
    hot.keep(cache, OLD, {3, 17})
    hot.preload(cache, OLD.key)
    (cache.entry_dir(OLD.key) / "hot").write_bytes(b"[")
    hot.preload(cache, OLD.key)
    hot.preload(cache, NEW.key)  # is none
    covered = {piece for start, length in asked for piece in range(start, start + length, 4096)}
    assert covered == {
        at for piece in (3, 17) for at in range(piece * HOT_PIECE, (piece + 1) * HOT_PIECE, 4096)
    }
    assert max(length for _, length in asked) <= hot.AHEAD
