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

from forestage_estimate.accounting import ImageStart

ImageVersion = tuple[str, bool]
QUARTER_HOUR_S = 900  # seconds of an hour; months begin at one of them everywhere


@dataclass(frozen=True)
class ImageFile:
    """What is known of an image: bytes, and when it was last written (seconds since 1970)."""

    size_bytes: int
    modified_at: float


@dataclass
class StartTotals:
    """Of some starts: how many, the hits among them, and the bytes of hits and of all others."""

    starts: int = 0
    hits: int = 0
    saved_bytes: int = 0
    read_bytes: int = 0

    def add_starts(self, size_bytes: int, starts: int, hits: int) -> None:
        """Add starts of an image of `size_bytes` bytes."""
        self.starts += starts
        self.hits += hits
        self.saved_bytes += size_bytes * hits
        self.read_bytes += size_bytes * (starts - hits)


class LruCache:
    """One node's: the least recently used goes first."""

    def __init__(self, capacity_bytes: int, sizes: Mapping[ImageVersion, int]) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes = OrderedDict(sizes)
        self._free_bytes = capacity_bytes - sum(sizes.values())

    def request(self, key: ImageVersion, size_bytes: int) -> bool:
        """Whether it is there; it is afterwards, if it can be."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        # An older version is the first to go.
        self._free_bytes += self._sizes.pop((key[0], not key[1]), 0)
        if size_bytes <= self._capacity_bytes:
            while self._free_bytes < size_bytes:
                self._free_bytes += self._sizes.popitem(last=False)[1]
            self._sizes[key] = size_bytes
            self._free_bytes -= size_bytes
        return False


class NodeCaches:
    """One node's caches of several sizes. Those that have evicted nothing yet hold the same."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._sizes = capacities  # the smallest first
        self._all_bits = (1 << len(capacities)) - 1
        self._split_caches: list[LruCache] = []  # of the first sizes
        self._common_sizes: OrderedDict[ImageVersion, int] = OrderedDict()  # what all others hold
        self._used_bytes = 0
        self._last_request: tuple[ImageVersion, int] | None = None

    def request(self, key: ImageVersion, size_bytes: int) -> int:
        """Return in which caches it is there, a bit for each; it is afterwards, if it can be."""
        if self._last_request and self._last_request[0] == key:
            return self._last_request[1]  # the most recently used: it stays, and evicts none
        hit_bits = 0
        common = self._common_sizes
        if key in common:
            common.move_to_end(key)
            hit_bits = self._all_bits >> len(self._split_caches) << len(self._split_caches)
        elif len(self._split_caches) < len(self._sizes):
            older_version = (key[0], not key[1])
            used_bytes = self._used_bytes - common.get(older_version, 0) + size_bytes
            while (
                len(self._split_caches) < len(self._sizes)
                and self._sizes[len(self._split_caches)] < used_bytes
            ):
                self._split_caches.append(LruCache(self._sizes[len(self._split_caches)], common))
            common.pop(older_version, None)
            common[key] = size_bytes
            self._used_bytes = used_bytes
            if len(self._split_caches) == len(self._sizes):
                common.clear()
        for index, cache in enumerate(self._split_caches):
            hit_bits |= cache.request(key, size_bytes) << index
        fits = bisect_left(self._sizes, size_bytes)
        self._last_request = key, self._all_bits >> fits << fits
        return hit_bits


def find_image_version(start: ImageStart, file: ImageFile) -> ImageVersion:
    """An image, and whether it is the one that is there now: older ones cannot be told apart."""
    return start.image, start.start_time >= file.modified_at


def replay_starts(
    starts: Iterable[ImageStart], files: Mapping[str, ImageFile], sizes: Sequence[int]
) -> list[dict[str, StartTotals]]:
    """What caches of each of `sizes` bytes would have done, by month and partition: `2026-11 gpu`.

    `sizes` begin with the smallest. `starts` are in their order; those whose file is not known are
    left out.
    """
    caches: dict[str, NodeCaches] = {}
    sums: list[dict[str, StartTotals]] = [{} for _ in sizes]
    for start in starts:
        file = files.get(start.image)
        if file is None:
            continue
        version = find_image_version(start, file)
        nodes_by_hits: dict[int, int] = {}  # how many nodes had it in which caches
        for node in start.nodes:
            if node not in caches:
                caches[node] = NodeCaches(sizes)
            hits = caches[node].request(version, file.size_bytes)
            nodes_by_hits[hits] = nodes_by_hits.get(hits, 0) + 1
        group = _format_group(start)
        for index, by_group in enumerate(sums):
            hit_count = sum(nodes_by_hits[hits] for hits in nodes_by_hits if hits >> index & 1)
            by_group.setdefault(group, StartTotals()).add_starts(
                file.size_bytes, len(start.nodes), hit_count
            )
    return sums


def _format_group(start: ImageStart) -> str:
    return f"{_format_month(int(start.start_time // QUARTER_HOUR_S))} {start.partition}"


@functools.lru_cache(maxsize=1 << 16)
def _format_month(quarter: int) -> str:
    return time.strftime("%Y-%m", time.localtime(quarter * QUARTER_HOUR_S))


def sum_totals(sums: Iterable[StartTotals]) -> StartTotals:
    """Of several."""
    total = StartTotals()
    for part in sums:
        total.starts += part.starts
        total.hits += part.hits
        total.saved_bytes += part.saved_bytes
        total.read_bytes += part.read_bytes
    return total
