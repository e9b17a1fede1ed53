"""An LRU cache of each node, fed with the starts of a period in their order. Pure.

As forestage has it: a hit is a start whose image the node has in this version. Not modelled: images
that jobs are using, which are not evicted; peers; copies that were never finished.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forestage_estimate.accounting import Start

QUARTER = 900  # seconds of an hour; months begin at one of them everywhere


@dataclass(frozen=True)
class File:
    """What is known of an image: bytes, and when it was last written (seconds since 1970)."""

    size: int
    written: float


@dataclass
class Sum:
    """Of some starts: how many, the hits among them, and the bytes of hits and of all others."""

    starts: int = 0
    hits: int = 0
    saved: int = 0
    read: int = 0

    def add(self, size: int, hit: bool) -> None:
        self.starts += 1
        self.hits += hit
        self.saved += size * hit
        self.read += size * (not hit)


class Cache:
    """One node's: the least recently used goes first."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._sizes: OrderedDict[tuple[str, bool], int] = OrderedDict()

    def ask(self, key: tuple[str, bool], size: int) -> bool:
        """Whether it is there; it is afterwards, if it can be."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        # An older version is the first to go.
        self._free += self._sizes.pop((key[0], not key[1]), 0)
        if size <= self._size:
            while self._free < size:
                self._free += self._sizes.popitem(last=False)[1]
            self._sizes[key] = size
            self._free -= size
        return False


def version(start: Start, file: File) -> tuple[str, bool]:
    """An image, and whether it is the one that is there now: older ones cannot be told apart."""
    return start.image, start.at >= file.written


def replay(starts: Iterable[Start], files: Mapping[str, File], size: int) -> dict[str, Sum]:
    """What caches of `size` bytes would have done, by month and partition: `2026-11 gpu`.

    `starts` are in their order; those whose file is not known are left out.
    """
    caches: dict[str, Cache] = {}
    sums: dict[str, Sum] = {}
    for start in starts:
        file = files.get(start.image)
        if file is None:
            continue
        cache = caches.setdefault(start.node, Cache(size))
        hit = cache.ask(version(start, file), file.size)
        sums.setdefault(_group(start), Sum()).add(file.size, hit)
    return sums


def _group(start: Start) -> str:
    return f"{_month(int(start.at // QUARTER))} {start.partition}"


@functools.lru_cache(maxsize=1 << 16)
def _month(quarter: int) -> str:
    return time.strftime("%Y-%m", time.localtime(quarter * QUARTER))


def total(sums: Iterable[Sum]) -> Sum:
    """Of several."""
    whole = Sum()
    for one in sums:
        whole.starts += one.starts
        whole.hits += one.hits
        whole.saved += one.saved
        whole.read += one.read
    return whole
