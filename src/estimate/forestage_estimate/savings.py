"""The figures of an estimate, each with the share of starts that it knows.

Pure, except for `read_image_files`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forestage_estimate.accounting import JobRecords
from forestage_estimate.cache_replay import ImageFile, StartTotals, replay_starts, sum_totals

GIB = 1 << 30
CURVE_SIZES = tuple(GIB * gib for gib in (32, 64, 128, 256, 512, 1024, 2048, 4096))
"""Cache sizes that are shown beside the one that was asked for."""


@dataclass(frozen=True)
class ValueRange:
    """A figure; with sizes that are a range it is one, too."""

    low: float
    high: float

    @classmethod
    def from_values(cls, values: Iterable[float]) -> ValueRange:
        values = list(values)
        return cls(min(values), max(values))

    def divide_by(self, whole: float) -> ValueRange:
        return ValueRange(self.low / whole, self.high / whole) if whole else ValueRange(0, 0)


@dataclass(frozen=True)
class ScriptSample:
    """Batch scripts that were read, of jobs whose rows name no image: their nodes, in all and of
    those whose script names one."""

    scripts: int
    nodes: int
    with_image: int


@dataclass(frozen=True)
class CacheResult:
    """What caches of one size would have done, with the smallest and with the largest sizes."""

    cache: int
    hits: ValueRange
    saved: ValueRange
    read: ValueRange


@dataclass(frozen=True)
class PartitionMonth:
    """A month and a partition."""

    month: str
    partition: str
    starts: int
    hits: ValueRange
    saved: ValueRange
    read: ValueRange


@dataclass(frozen=True)
class SavingsFigures:
    """`known` starts have a path in a row, `sized` of these a size, `registry` are of a registry's
    images; `unknown` starts (nodes of jobs) name no image, and have none or are not seen.

    `unseen` is the share of starts with an image whose image no row shows, None without a sample:
    then it is at most `most_unseen`.
    """

    first: float
    last: float
    jobs: int
    dropped: int
    known: int
    registry: int
    unknown: int
    sized: int
    images: int
    images_sized: int
    unseen: float | None
    most_unseen: float
    sample: ScriptSample | None
    chosen: CacheResult
    curve: Sequence[CacheResult]
    groups: Sequence[PartitionMonth]
    node_hours: ValueRange | None


def read_image_files(
    paths: Iterable[str], sizes: Sequence[int] = ()
) -> tuple[dict[str, ImageFile], ...]:
    """The files as this user sees them; one that is not seen has the least, and the largest, of
    `sizes`, or is left out."""
    found: dict[str, ImageFile] = {}
    missing = []
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116  pathlib would fold what users write
            found[path] = ImageFile(status.st_size, status.st_mtime)
        except (OSError, ValueError):  # a path with a NUL
            missing.append(path)
    size_limits = sorted({min(sizes), max(sizes)}) if sizes else []
    image_files = [
        {**found, **{path: ImageFile(size, 0) for path in missing}} for size in size_limits
    ]
    return tuple(image_files) or (found,)


def estimate_savings(
    accounting: JobRecords,
    files: Sequence[Mapping[str, ImageFile]],
    cache_bytes: int,
    sample: ScriptSample | None = None,
    cold_seconds_per_gib: float | None = None,
) -> SavingsFigures:
    """Estimate what caches of `cache_bytes` would have saved.

    `files` are what `read_image_files` returns: one set of sizes, or the smallest and the largest.
    """
    jobs = accounting.jobs.values()
    all_starts = sorted(
        (start for job in jobs for start in job.starts), key=lambda one: one.start_time
    )
    path_starts = [start for start in all_starts if start.is_path]
    seen_count, path_count = (
        sum(len(start.nodes) for start in selected) for selected in (all_starts, path_starts)
    )
    images = {start.image for start in path_starts}
    unknown_count = sum(len(job.nodes) for job in jobs if not job.starts)
    sizes = sorted({*CURVE_SIZES, cache_bytes})
    replayed = [replay_starts(path_starts, image_files, sizes) for image_files in files]
    curve = [
        _summarize_cache(size, [by_size[index] for by_size in replayed])
        for index, size in enumerate(sizes)
    ]
    sums = [by_size[sizes.index(cache_bytes)] for by_size in replayed]
    chosen = curve[sizes.index(cache_bytes)]
    times = [job.start_time for job in jobs]
    sized_count = sum_totals(sums[0].values()).starts
    unseen_share = _estimate_unseen_share(seen_count, unknown_count, accounting, sample)
    node_hours = None
    if cold_seconds_per_gib is not None:
        low, high = (
            bytes_ / GIB * cold_seconds_per_gib / 3600
            for bytes_ in (chosen.saved.low, chosen.saved.high)
        )
        node_hours = ValueRange(low, high)
    return SavingsFigures(
        first=min(times, default=0),
        last=max(times, default=0),
        jobs=len(accounting.jobs),
        dropped=accounting.dropped_lines,
        known=path_count,
        registry=seen_count - path_count,
        unknown=unknown_count,
        sized=sized_count,
        images=len(images),
        images_sized=len(images & files[0].keys()),
        unseen=unseen_share,
        most_unseen=unknown_count / (seen_count + unknown_count) if unknown_count else 0,
        sample=sample,
        chosen=chosen,
        curve=curve,
        groups=_summarize_groups(sums),
        node_hours=node_hours,
    )


def _estimate_unseen_share(
    seen_count: int, unknown_count: int, accounting: JobRecords, sample: ScriptSample | None
) -> float | None:
    """The share of starts with an image that no row shows: of the scripts' share in the sample."""
    if not unknown_count:
        return 0.0
    if sample is None or not sample.nodes:
        return None
    jobs = accounting.jobs.values()
    batch_count = sum(len(job.nodes) for job in jobs if job.is_batch and not job.starts)
    hidden_count = batch_count * sample.with_image / sample.nodes
    return hidden_count / (seen_count + hidden_count) if hidden_count else 0.0


def _summarize_cache(cache: int, sums: Sequence[Mapping[str, StartTotals]]) -> CacheResult:
    totals = [sum_totals(one.values()) for one in sums]
    return CacheResult(
        cache,
        ValueRange.from_values(one.hits for one in totals),
        ValueRange.from_values(one.saved_bytes for one in totals),
        ValueRange.from_values(one.read_bytes for one in totals),
    )


def _summarize_groups(sums: Sequence[Mapping[str, StartTotals]]) -> list[PartitionMonth]:
    groups = []
    for name in sorted(sums[0]):
        month, _, partition = name.partition(" ")
        totals = [one[name] for one in sums]
        hits = ValueRange.from_values(one.hits for one in totals)
        saved = ValueRange.from_values(one.saved_bytes for one in totals)
        read = ValueRange.from_values(one.read_bytes for one in totals)
        groups.append(PartitionMonth(month, partition, totals[0].starts, hits, saved, read))
    return groups
