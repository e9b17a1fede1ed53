"""The figures of an estimate, each with the share of starts that it knows. Pure but for `look`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forestage_estimate.accounting import Accounting
from forestage_estimate.replay import File, Sum, replay, total

GIB = 1 << 30
CURVE = tuple(GIB * gib for gib in (32, 64, 128, 256, 512, 1024, 2048, 4096))
"""Cache sizes that are shown beside the one that was asked for."""


@dataclass(frozen=True)
class Range:
    """A figure; with sizes that are a range it is one, too."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        values = list(values)
        return cls(min(values), max(values))

    def share_of(self, whole: float) -> Range:
        return Range(self.low / whole, self.high / whole) if whole else Range(0, 0)


@dataclass(frozen=True)
class Sample:
    """Batch scripts that were read, of jobs whose rows name no image: their nodes, in all and of
    those whose script names one."""

    scripts: int
    nodes: int
    with_image: int


@dataclass(frozen=True)
class Result:
    """What caches of one size would have done, with the smallest and with the largest sizes."""

    cache: int
    hits: Range
    saved: Range
    read: Range


@dataclass(frozen=True)
class Group:
    """A month and a partition."""

    month: str
    partition: str
    starts: int
    hits: Range
    saved: Range
    read: Range


@dataclass(frozen=True)
class Figures:
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
    sample: Sample | None
    chosen: Result
    curve: Sequence[Result]
    groups: Sequence[Group]
    node_hours: Range | None


def look(paths: Iterable[str], sizes: Sequence[int] = ()) -> tuple[dict[str, File], ...]:
    """The files as this user sees them; one that is not seen has the least, and the largest, of
    `sizes`, or is left out."""
    found: dict[str, File] = {}
    missing = []
    for path in paths:
        try:
            seen = os.stat(path)  # noqa: PTH116  pathlib would fold what users write
            found[path] = File(seen.st_size, seen.st_mtime)
        except (OSError, ValueError):  # a path with a NUL
            missing.append(path)
    ends = sorted({min(sizes), max(sizes)}) if sizes else []
    guessed = [{**found, **{path: File(size, 0) for path in missing}} for size in ends]
    return tuple(guessed) or (found,)


def estimate(
    accounting: Accounting,
    files: Sequence[Mapping[str, File]],
    cache: int,
    sample: Sample | None = None,
    cold: float | None = None,
) -> Figures:
    """`files` are one look or two, `cold` seconds that a GiB of image costs a cold start."""
    jobs = accounting.jobs.values()
    every = sorted((start for job in jobs for start in job.starts), key=lambda one: one.at)
    starts = [start for start in every if start.is_path]
    seen, known = (sum(len(start.nodes) for start in some) for some in (every, starts))
    images = {start.image for start in starts}
    unknown = sum(len(job.nodes) for job in jobs if not job.starts)
    sizes = sorted({*CURVE, cache})
    replayed = [replay(starts, look, sizes) for look in files]
    curve = [
        _result(size, [by_size[number] for by_size in replayed])
        for number, size in enumerate(sizes)
    ]
    sums = [by_size[sizes.index(cache)] for by_size in replayed]
    chosen = curve[sizes.index(cache)]
    times = [job.at for job in jobs]
    sized = total(sums[0].values()).starts
    unseen = _unseen(seen, unknown, accounting, sample)
    hours = None
    if cold is not None:
        low, high = (bytes_ / GIB * cold / 3600 for bytes_ in (chosen.saved.low, chosen.saved.high))
        hours = Range(low, high)
    return Figures(
        first=min(times, default=0),
        last=max(times, default=0),
        jobs=len(accounting.jobs),
        dropped=accounting.dropped,
        known=known,
        registry=seen - known,
        unknown=unknown,
        sized=sized,
        images=len(images),
        images_sized=len(images & files[0].keys()),
        unseen=unseen,
        most_unseen=unknown / (seen + unknown) if unknown else 0,
        sample=sample,
        chosen=chosen,
        curve=curve,
        groups=_groups(sums),
        node_hours=hours,
    )


def _unseen(seen: int, unknown: int, accounting: Accounting, sample: Sample | None) -> float | None:
    """The share of starts with an image that no row shows: of the scripts' share in the sample."""
    if not unknown:
        return 0.0
    if sample is None or not sample.nodes:
        return None
    jobs = accounting.jobs.values()
    batch = sum(len(job.nodes) for job in jobs if job.is_batch and not job.starts)
    hidden = batch * sample.with_image / sample.nodes
    return hidden / (seen + hidden) if hidden else 0.0


def _result(cache: int, sums: Sequence[Mapping[str, Sum]]) -> Result:
    wholes = [total(one.values()) for one in sums]
    return Result(
        cache,
        Range.of(one.hits for one in wholes),
        Range.of(one.saved for one in wholes),
        Range.of(one.read for one in wholes),
    )


def _groups(sums: Sequence[Mapping[str, Sum]]) -> list[Group]:
    found = []
    for name in sorted(sums[0]):
        month, _, partition = name.partition(" ")
        wholes = [one[name] for one in sums]
        hits = Range.of(one.hits for one in wholes)
        saved = Range.of(one.saved for one in wholes)
        read = Range.of(one.read for one in wholes)
        found.append(Group(month, partition, wholes[0].starts, hits, saved, read))
    return found
