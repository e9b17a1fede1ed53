"""What the cache's disk forgets when the power goes, though it had confirmed it.

Parts are good for one boot, so bytes of an earlier one must never come into an entry. Nor is an
entry served before a stager or a sweep has read it in the new boot: no job sees forgotten bytes.
"""

from __future__ import annotations

import os
from pathlib import Path

from forestage.cache.layout import PROVEN, Cache

Inode = tuple[int, int]  # device and number; a tmpfs never gives a number twice


class Disk:
    """Knows what was forgotten, by the inodes of the images."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._meant: dict[Inode, bytes] = {}  # of entries: what was written there
        self._old: set[Inode] = set()  # of parts of earlier boots

    def grows_old(self) -> None:
        """A boot is over, and the parts that were written in it are of no use any more."""
        self._old |= {_inode(image.lstat()) for image in self._parts()}

    def forgets(self, which: int) -> int:
        """Bytes of every part and of one entry that nobody has read since; gives their number."""
        for image in self._parts():
            _zero(image)
        due = [key for key in sorted(self._keys()) if self._is_due(key)]
        if not due:
            return 0
        image = self._cache.image_path(due[which % len(due)])
        before = self.read(image)
        _zero(image)
        if image.read_bytes() == before:
            return 0
        self._meant[_inode(image.stat())] = before
        return 1

    def read(self, path: Path) -> bytes:
        """An entry's bytes; of what was forgotten, those that were written."""
        with path.open("rb") as file:
            data = file.read()
            return self._meant.get(_inode(os.fstat(file.fileno())), data)

    def bad(self) -> set[str]:
        """The keys of the entries that hold other bytes than were written."""
        return {key for key in self._keys() if self._is_bad(key)}

    def is_deleted(self) -> None:
        """Somebody has deleted it all."""
        self._meant.clear()

    def is_proven(self) -> None:
        """A sweep has read all: from now on nothing may be wrong any more."""
        assert not self.bad(), "a sweep left an entry that lost bytes"
        self._meant.clear()

    def check(self) -> None:
        """No entry is made of what an earlier boot left half done."""
        for key in self._keys():
            assert self._of(key) not in self._old, f"{key} was begun in an earlier boot"

    def _is_bad(self, key: str) -> bool:
        meant = self._meant.get(self._of(key) or (0, 0))
        return (
            meant is not None and self._cache.image_path(key).read_bytes() != meant
        )  # else: mended

    def _is_due(self, key: str) -> bool:
        entry = self._cache.find_entry_by_key(key)
        note = self._cache.entry_dir(key) / "boot"
        return entry is not None and bool(entry.digest) and note.read_bytes() != PROVEN

    def _keys(self) -> list[str]:
        return [path.name for path in self._cache.entries.glob("*")]

    def _of(self, key: str) -> Inode | None:
        try:
            return _inode(self._cache.image_path(key).lstat())
        except FileNotFoundError:
            return None

    def _parts(self) -> list[Path]:
        return list(self._cache.parts.glob("*/image"))


def _inode(facts: os.stat_result) -> Inode:
    return facts.st_dev, facts.st_ino


def _zero(image: Path) -> None:
    """The first half. What holds no data yet stays without: a full disk could not take it."""
    size = image.stat().st_size
    with image.open("r+b") as file:
        half = size // 2 + size % 2
        if any(file.read(half)):
            file.seek(0)
            file.write(bytes(half))
