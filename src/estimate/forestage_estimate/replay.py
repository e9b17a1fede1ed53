"""An LRU cache of each node, fed with the starts of a period in their order. Pure.

As forestage has it: a hit is a start whose image the node has in this version. Not modelled: images
that jobs are using, which are not evicted; peers; copies that were never finished.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forestage_estimate.accounting import Start

Version = tuple[str, bool]
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

    def add(self, size: int, starts: int, hits: int) -> None:
        """Add starts of an image of `size` bytes."""
        self.starts += starts
        self.hits += hits
        self.saved += size * hits
        self.read += size * (starts - hits)


class Cache:
    """One node's: the least recently used goes first."""

    def __init__(self, size: int, held: Mapping[Version, int]) -> None:
        self._size = size
        self._sizes = OrderedDict(held)
        self._free = size - sum(held.values())

    def ask(self, key: Version, size: int) -> bool:
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


class NodeCaches:
    """One node's caches of several sizes. Those that have evicted nothing yet hold the same."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # the smallest first
        self._all = (1 << len(sizes)) - 1
        self._own: list[Cache] = []  # of the first sizes
        self._common: OrderedDict[Version, int] = OrderedDict()  # what all others hold
        self._used = 0
        self._last: tuple[Version, int] | None = None

    def ask(self, key: Version, size: int) -> int:
        """Return in which caches it is there, a bit for each; it is afterwards, if it can be."""
        if self._last and self._last[0] == key:
            return self._last[1]  # the most recently used: it stays, and evicts none
        found = 0
        held = self._common
        if key in held:
            held.move_to_end(key)
            found = self._all >> len(self._own) << len(self._own)
        elif len(self._own) < len(self._sizes):
            older = (key[0], not key[1])
            used = self._used - held.get(older, 0) + size
            while len(self._own) < len(self._sizes) and self._sizes[len(self._own)] < used:
                self._own.append(Cache(self._sizes[len(self._own)], held))
            held.pop(older, None)
            held[key] = size
            self._used = used
            if len(self._own) == len(self._sizes):
                held.clear()
        for number, cache in enumerate(self._own):
            found |= cache.ask(key, size) << number
        fits = bisect_left(self._sizes, size)
        self._last = key, self._all >> fits << fits
        return found


def version(start: Start, file: File) -> Version:
    """An image, and whether it is the one that is there now: older ones cannot be told apart."""
    return start.image, start.at >= file.written


def replay(
    starts: Iterable[Start], files: Mapping[str, File], sizes: Sequence[int]
) -> list[dict[str, Sum]]:
    """What caches of each of `sizes` bytes would have done, by month and partition: `2026-11 gpu`.

    `sizes` begin with the smallest. `starts` are in their order; those whose file is not known are
    left out.
    """
    caches: dict[str, NodeCaches] = {}
    sums: list[dict[str, Sum]] = [{} for _ in sizes]
    for start in starts:
        file = files.get(start.image)
        if file is None:
            continue
        key = version(start, file)
        times: dict[int, int] = {}  # how many nodes had it in which caches
        for node in start.nodes:
            if node not in caches:
                caches[node] = NodeCaches(sizes)
            hits = caches[node].ask(key, file.size)
            times[hits] = times.get(hits, 0) + 1
        group = _group(start)
        for number, by_group in enumerate(sums):
            hit = sum(times[hits] for hits in times if hits >> number & 1)
            by_group.setdefault(group, Sum()).add(file.size, len(start.nodes), hit)
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
