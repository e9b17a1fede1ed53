"""What must never be evicted: the plain file `pinned` beside an entry's image."""

from collections.abc import Iterable

import msgspec

from forestage.cache.layout import Cache
from forestage.entries import Item
from forestage.errors import NotFound
from forestage.system import atomic, lock
from forestage.system.terminal import Column, Piece, Table, short


class Pinned(msgspec.Struct, frozen=True):
    """One entry after the command; `changed` is False where it was so before."""

    key: str
    path: str
    pinned: bool
    changed: bool


def pin(cache: Cache, item: Item) -> Pinned:
    """Keeps the entry from being evicted. Raises NotFound where it is gone or damaged."""
    if item.damaged:
        raise NotFound(f"{item.key} is damaged and never served", "evict it")
    return Pinned(item.key, item.path, True, _change(cache, item.key, True))


def unpin(cache: Cache, item: Item) -> Pinned:
    """Lets the entry be evicted again. Raises NotFound where it is gone."""
    return Pinned(item.key, item.path, False, _change(cache, item.key, False))


def _change(cache: Cache, key: str, to: bool) -> bool:
    """Whether anything changed. Under the space lock, as evict reads pins and renames entries."""
    directory = cache.entry_dir(key)
    file = directory / "pinned"
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        if not directory.exists():
            raise NotFound(f"{key} was evicted just now")
        if file.exists() == to:
            return False
        if to:
            file.touch(mode=0o600)
        else:
            file.unlink()
        atomic.sync_directory(directory)
    return True


def pieces(done: Iterable[Pinned]) -> list[Piece]:
    """Pure: what `pin` and `unpin` print."""
    columns = (Column("key"), Column("result"), Column("path", folds=True))
    rows = tuple((short(one.key), _told(one), one.path or "-") for one in done)
    return [Table(columns, rows)]


def _told(one: Pinned) -> str:
    if one.pinned:
        return "pinned" if one.changed else "was pinned already"
    return "unpinned" if one.changed else "was not pinned"
