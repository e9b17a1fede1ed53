"""The hot map: kept where it says something, handed to the image that supersedes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fixtures import calls_of
from forestage.cache import hot_pieces
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import HOT_PIECE
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage

SIZE = 40 * HOT_PIECE
OLD = SourceImage(FileIdentity("/lustre/a.sqsh", 1, SIZE, 1, 1), AccessRights(0, 0, 0o644))
NEW = SourceImage(FileIdentity("/lustre/a.sqsh", 2, SIZE, 2, 2), AccessRights(0, 0, 0o644))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Has an entry of OLD, and a part of NEW."""
    cache = Cache(tmp_path / "cache")
    cache.prepare(require_mount=False)
    stored(cache, OLD, 1.0)
    cache.part(NEW.key).directory.mkdir(parents=True)
    return cache


def stored(cache: Cache, image: SourceImage, created: float) -> None:
    directory = cache.entry_dir(image.key)
    directory.mkdir(parents=True)
    entry = Entry(image.key, image.identity, image.access, created, "chunks")
    (directory / "entry.json").write_bytes(msgspec.json.encode(entry))
    with (directory / "image").open("wb") as file:
        file.truncate(image.size)


@pytest.mark.parametrize(("count", "kept"), [(0, False), (1, True), (10, True), (11, False)])
def test_hot_map_is_saved_unless_it_is_empty_or_has_too_many_pieces(
    cache: Cache, count: int, kept: bool
) -> None:
    hot_pieces.save_hot_map(cache, OLD, set(range(count)))
    assert (cache.entry_dir(OLD.key) / "hot").exists() == kept


def test_hot_map_of_a_copy_under_way_is_saved_with_its_part(cache: Cache) -> None:
    hot_pieces.save_hot_map(cache, NEW, {3, 17})
    assert cache.part(NEW.key).list_hot_chunks(2 * HOT_PIECE) == [1, 8]


def test_hot_map_of_an_image_without_part_or_entry_is_not_saved(cache: Cache) -> None:
    cache.drop_part(NEW.key)
    hot_pieces.save_hot_map(cache, NEW, {3})
    assert not cache.part_dir(NEW.key).exists()


def test_superseding_image_inherits_the_hot_map_of_the_newest_version(cache: Cache) -> None:
    newer = msgspec.structs.replace(OLD.identity, inode=7)
    stored(cache, SourceImage(newer, OLD.access), 5.0)
    hot_pieces.save_hot_map(cache, OLD, {1})
    hot_pieces.save_hot_map(cache, SourceImage(newer, OLD.access), {2})
    hot_pieces.inherit_hot_map(cache, NEW)
    assert cache.part(NEW.key).list_hot_chunks(HOT_PIECE) == [2]


@pytest.mark.parametrize("change", [{"path": "/lustre/b.sqsh"}, {"size": 2 * SIZE}])
def test_image_of_another_path_or_size_inherits_no_hot_map(
    cache: Cache, change: dict[str, object]
) -> None:
    hot_pieces.save_hot_map(cache, OLD, {1})
    other = SourceImage(msgspec.structs.replace(NEW.identity, **change), NEW.access)
    cache.part(other.key).directory.mkdir(parents=True)
    hot_pieces.inherit_hot_map(cache, other)
    assert cache.part(other.key).list_hot_chunks(HOT_PIECE) == []


def test_inheriting_a_hot_map_makes_as_many_calls_among_10_as_among_1000_entries(
    cache: Cache,
) -> None:
    hot_pieces.save_hot_map(cache, OLD, {3})
    part, counts = cache.part(NEW.key), []

    def inherit() -> None:
        part.hot.unlink(missing_ok=True)
        hot_pieces.inherit_hot_map(cache, NEW)

    for some in (10, 1000):
        for number in range(some):
            (cache.entries / f"{number:04}").mkdir(exist_ok=True)
        counts.append(calls_of(inherit))
        assert part.list_hot_chunks(HOT_PIECE) == [3]
    assert counts[0] == counts[1]


def test_inherited_hot_map_is_inherited_again_after_its_first_image_was_evicted(
    cache: Cache,
) -> None:
    hot_pieces.save_hot_map(cache, OLD, {3})
    hot_pieces.inherit_hot_map(cache, NEW)
    cache.part_dir(NEW.key).rename(cache.entry_dir(NEW.key))
    entry = Entry(NEW.key, NEW.identity, NEW.access, 2.0, "chunks")
    (cache.entry_dir(NEW.key) / "entry.json").write_bytes(msgspec.json.encode(entry))
    with cache.image_path(NEW.key).open("wb") as file:
        file.truncate(SIZE)
    hot_pieces.index_entry(cache, NEW)
    cache.evict_entry(OLD.key)
    third = SourceImage(msgspec.structs.replace(NEW.identity, inode=3), NEW.access)
    cache.part(third.key).directory.mkdir(parents=True)
    hot_pieces.inherit_hot_map(cache, third)
    assert cache.part(third.key).list_hot_chunks(HOT_PIECE) == [3]


def test_hot_index_of_a_path_names_only_its_last_images(cache: Cache) -> None:
    images = [
        SourceImage(msgspec.structs.replace(OLD.identity, inode=n), OLD.access) for n in range(9)
    ]
    for number, image in enumerate(images):
        if image.key != OLD.key:
            stored(cache, image, 2.0 + number)
        hot_pieces.save_hot_map(cache, image, {number})
    hot_pieces.inherit_hot_map(cache, NEW)
    assert cache.part(NEW.key).list_hot_chunks(HOT_PIECE) == [8]
    (index,) = cache.hot_names.iterdir()
    assert len(msgspec.json.decode(index.read_bytes())) == hot_pieces.NAMED


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"[1]",
        b'["", "..", "../../etc", "\\u0000"]',
        msgspec.json.encode(["0" * hot_pieces.KEY, "x" * 5000]),
        msgspec.json.encode([NEW.key]),
    ],
)
def test_hot_index_with_wrong_content_gives_no_map_and_is_repaired_by_the_sweep(
    cache: Cache, left: bytes
) -> None:
    hot_pieces.save_hot_map(cache, OLD, {3})
    (index,) = cache.hot_names.iterdir()
    index.write_bytes(left)
    hot_pieces.inherit_hot_map(cache, NEW)
    assert not cache.part(NEW.key).hot.exists()
    cache.drop_part(NEW.key)
    hot_pieces.repair_index(cache)
    cache.part(NEW.key).directory.mkdir()
    hot_pieces.inherit_hot_map(cache, NEW)
    assert cache.part(NEW.key).list_hot_chunks(HOT_PIECE) == [3]


def test_hot_index_that_names_another_paths_image_gives_no_map(cache: Cache) -> None:
    other = SourceImage(msgspec.structs.replace(OLD.identity, path="/lustre/b"), OLD.access)
    stored(cache, other, 2.0)
    hot_pieces.save_hot_map(cache, OLD, {3})
    (index,) = cache.hot_names.iterdir()
    hot_pieces.save_hot_map(cache, other, {4})
    index.write_bytes(msgspec.json.encode([other.key]))
    hot_pieces.inherit_hot_map(cache, NEW)
    assert not cache.part(NEW.key).hot.exists()


def test_hot_index_repair_drops_the_names_of_evicted_images(cache: Cache) -> None:
    hot_pieces.save_hot_map(cache, OLD, {3})
    hot_pieces.repair_index(cache)
    assert len(list(cache.hot_names.iterdir())) == 1
    cache.evict_entry(OLD.key)
    hot_pieces.repair_index(cache)
    assert list(cache.hot_names.iterdir()) == []


def test_resumed_copy_keeps_its_own_hot_map(cache: Cache) -> None:
    hot_pieces.save_hot_map(cache, OLD, {1})
    hot_pieces.save_hot_map(cache, NEW, {2})
    hot_pieces.inherit_hot_map(cache, NEW)
    assert cache.part(NEW.key).list_hot_chunks(HOT_PIECE) == [2]
