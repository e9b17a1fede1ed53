"""The hot map: which pieces of an image jobs read in the first minute, beside it as `hot`.

The copy of the image that supersedes it begins with them (stage/chunks): its layout is much the
same. So does its own copy, if it is resumed. With `preload` the sweep has the page cache hold them
after a boot. A job that unpacks the image reads all of it, which says nothing: such a map is not
kept.
"""

import contextlib
import os

import msgspec

from forestage.cache.image import Image
from forestage.cache.layout import Cache, open_copy
from forestage.cache.part import HOT_PIECE, chunk_count
from forestage.system import records

WINDOW = 60.0  # seconds from the first read on
MOST = 0.25  # of the image's pieces: more are no hot spots
AHEAD = 128 * 1024  # bytes; what is asked for at once beyond the disk's own window is cut off
ALIKE = 0.3  # of its size, by which a superseding image may differ


def keep(cache: Cache, image: Image, pieces: set[int]) -> None:
    """Writes the map beside the entry, or the part that it will be. Raises OSError."""
    if not 0 < len(pieces) <= MOST * chunk_count(image.size, HOT_PIECE):
        return
    data = msgspec.json.encode(sorted(pieces))
    # The part may become the entry this moment.
    for directory in (cache.entry_dir, cache.part_dir, cache.entry_dir):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            records.write(directory(image.key) / "hot", data)
            return


def inherit(cache: Cache, image: Image) -> None:
    """Gives a part the map of the newest entry of the same path. The caller holds the key's lock.

    Raises OSError.
    """
    part = cache.part(image.key)
    if part.hot.exists():  # of this very image, from a copy that goes on
        return
    old = [
        one.entry
        for one in cache.stored_entries()
        if one.entry is not None
        and one.entry.identity.path == image.path
        and abs(one.entry.identity.size - image.size) <= ALIKE * image.size
    ]
    for entry in sorted(old, key=lambda one: one.created, reverse=True):
        with contextlib.suppress(FileNotFoundError, records.Damaged):
            records.write(part.hot, records.read(cache.entry_dir(entry.key) / "hot"))
            return


def preload(cache: Cache, key: str) -> None:
    """Has the kernel read the hot pieces of an entry, if it has a map, into the page cache.

    It begins that, and does not wait for the end. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, records.Damaged):
        pieces = records.load(cache.entry_dir(key) / "hot", list[int])
        with open_copy(cache.image(key)) as copy:
            for piece in pieces:
                for start in range(piece * HOT_PIECE, (piece + 1) * HOT_PIECE, AHEAD):
                    os.posix_fadvise(copy.fileno(), start, AHEAD, os.POSIX_FADV_WILLNEED)
