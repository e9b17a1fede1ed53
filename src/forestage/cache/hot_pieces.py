"""The hot map: which pieces of an image jobs read in the first minute, beside it as `hot`.

The copy of the image that supersedes it begins with them (stage/chunks): its layout is much the
same. So does its own copy, if it is resumed. A job that unpacks the image reads all of it, which
says nothing: such a map is not kept.

Below the cache's hot/ a file for each path, by its hash, names the images of that path that had a
map last: so a copy need not read all entries for one. It is a hint, checked against entry.json.
Without it a copy begins with the first byte; evicting leaves it, and the sweep corrects it.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.cache.layout import Cache
from forestage.cache.part import HOT_PIECE, chunk_count
from forestage.cache.source_image import SourceImage
from forestage.system import files, records
from forestage.system.sha256 import sha256

WINDOW = 60.0  # seconds from the first read on
MOST = 0.25  # of the image's pieces: more are no hot spots
ALIKE = 0.3  # of its size, by which a superseding image may differ
NAMED = 4  # images of one path: the last may be a copy that never ends
KEY = 32  # characters of an image's key


def save_hot_map(cache: Cache, image: SourceImage, pieces: set[int]) -> None:
    """Writes the map beside the entry, or the part that it will be. Raises OSError."""
    if not 0 < len(pieces) <= MOST * chunk_count(image.size, HOT_PIECE):
        return
    data = msgspec.json.encode(sorted(pieces))
    # The part may become the entry this moment.
    for directory in (cache.entry_dir, cache.part_dir, cache.entry_dir):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            records.write(directory(image.key) / "hot", data)
            _add_to_index(cache, image.path, image.key)
            return


def inherit_hot_map(cache: Cache, image: SourceImage) -> None:
    """Gives a part the map of the newest entry of the same path. The caller holds the key's lock.

    Raises OSError.
    """
    part = cache.part(image.key)
    if part.hot.exists():  # of this very image, from a copy that goes on
        return
    old = [
        entry
        for entry in map(cache.find_entry_by_key, _read_index(_index_path(cache, image.path)))
        if entry is not None
        and entry.identity.path == image.path
        and abs(entry.identity.size - image.size) <= ALIKE * image.size
    ]
    for entry in sorted(old, key=lambda one: one.created, reverse=True):
        with contextlib.suppress(FileNotFoundError, records.DamagedRecord):
            records.write(part.hot, records.read_raw(cache.entry_dir(entry.key) / "hot"))
            return


def index_entry(cache: Cache, image: SourceImage) -> None:
    """Has the next version's copy find this entry's map, if it has one. Raises OSError."""
    if files.lstat_or_none(cache.entry_dir(image.key) / "hot"):
        _add_to_index(cache, image.path, image.key)


def repair_index(cache: Cache) -> None:
    """Drops names of images that are gone, and names those that have a map and no name.

    For the sweep: it looks at each entry. Raises OSError.
    """
    folder = cache.hot_names
    for file in folder.iterdir() if folder.is_dir() else ():
        keys = _read_index(file)
        if not any(
            files.lstat_or_none(at(key)) for key in keys for at in (cache.entry_dir, cache.part_dir)
        ):
            with contextlib.suppress(OSError):  # something else by that name
                file.unlink(missing_ok=True)
    mapped = [one.name for one in cache.entries.iterdir() if files.lstat_or_none(one / "hot")]
    entries = [entry for entry in map(cache.find_entry_by_key, mapped) if entry is not None]
    newest = {one.identity.path: one.key for one in sorted(entries, key=lambda one: one.created)}
    for path, key in newest.items():
        if not _read_index(_index_path(cache, path)):
            _add_to_index(cache, path, key)


def _index_path(cache: Cache, path: str) -> Path:
    return cache.hot_names / sha256(os.fsencode(path))[:32]


def _read_index(index: Path) -> list[str]:
    """The keys in it; what is none was never written so."""
    found = records.find(index, list[str]) or []
    return [key for key in found[:NAMED] if len(key) == KEY and key.isalnum()]


def _add_to_index(cache: Cache, path: str, key: str) -> None:
    """Puts the key first. Two at once: one of them is not named, until the sweep at the latest."""
    index = _index_path(cache, path)
    before = _read_index(index)
    if before[:1] == [key]:
        return
    index.parent.mkdir(mode=0o700, exist_ok=True)
    keys = [key, *(one for one in before if one != key)]
    records.write(index, msgspec.json.encode(keys[:NAMED]))
