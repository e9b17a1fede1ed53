"""The report's figures and their rendering as JSON.

`compute_report` makes a `SavingsReport` of running sums. Sizes are in bytes, times in seconds,
moments in seconds since the epoch; `SavingsReport` is also the JSON document, so its field names
are an interface.
"""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TypeVar

import msgspec

from forestage.events.prefetched_copies import PrefetchedBytes
from forestage.features.report.logs import LogCounts
from forestage.features.report.sums import (
    QUARTER,
    GroupFigures,
    ImageFigures,
    NodeFigures,
    PeriodSums,
    ReadThroughFigures,
    ReportSums,
    TimeWindow,
    WaitStats,
)

G = TypeVar("G", bound=GroupFigures)

HOUR, DAY = 3600, 86400
WIDTHS = (HOUR, 6 * HOUR, DAY, 7 * DAY, 28 * DAY, 364 * DAY)  # seconds of a period
MAX_PERIODS = 72  # thinner bars cannot be told apart
FIRST_MONDAY = 4 * DAY  # after the epoch


class SavingsEstimate(msgspec.Struct, frozen=True):
    """Another answer than `saved`, for clusters whose copies are not measured (peers).

    `gross` is what copying all `kept_off` bytes would have taken at `rate`, the median of `copies`
    in bytes per second; `net` is `gross` less all waiting, and may be negative.
    """

    net: float
    gross: float
    rate: float
    copies: int


class ReportPeriod(PeriodSums, kw_only=True):
    """The sums of the `SavingsReport.width` seconds from `start` on."""

    start: int


class SavingsReport(msgspec.Struct, frozen=True):
    """All figures of a report.

    `first` and `last` are the times of the earliest and latest event; `kept_off` are bytes by how
    they were kept off the shared file system, `evicted` entries by the hook that evicted them,
    `failed` failures by reason, `original` and `excluded` such starts by reason.
    Events outside of the window or at an impossible time are not counted.
    """

    made: float
    window: TimeWindow
    first: float | None
    last: float | None
    utc_offset: int
    total: PeriodSums
    hit_ratio: float | None
    kept_off: dict[str, int]
    all: GroupFigures
    estimate: SavingsEstimate | None
    waits: WaitStats
    through: ReadThroughFigures
    ahead: PrefetchedBytes
    failed: dict[str, int]
    evicted: dict[str, int]
    original: dict[str, int]
    excluded: dict[str, int]
    nodes: tuple[NodeFigures, ...]
    partitions: tuple[GroupFigures, ...]
    images: tuple[ImageFigures, ...]
    users: tuple[GroupFigures, ...]
    width: int
    periods: tuple[ReportPeriod, ...]
    events: int
    logs: LogCounts
    outside_window: int
    impossible_time: int


def compute_report(sums: ReportSums, logs: LogCounts, utc_offset: int) -> SavingsReport:
    total = PeriodSums()
    for slot in sums.slots.values():
        total.add(slot)
    width = _period_width(sums.first, sums.last)
    return SavingsReport(
        made=round(sums.now),
        window=sums.window,
        first=sums.first if sums.events else None,
        last=sums.last if sums.events else None,
        utc_offset=utc_offset,
        total=total,
        hit_ratio=total.hit_ratio,
        kept_off=sums.kept_off,
        all=sums.total,
        estimate=_estimate_savings(sums, total.seconds),
        waits=sums.waits.make_wait_stats(),
        through=msgspec.structs.replace(sums.through, ahead=sums.ahead.median()),
        ahead=sums.copied_ahead,
        failed=_most_first(sums.failed),
        evicted=dict(sorted(sums.evicted.items())),
        original=_most_first(sums.original),
        excluded=_most_first(sums.excluded),
        nodes=_sort_nodes(sums),
        partitions=_most_kept_off(sums.partitions),
        images=_most_kept_off(sums.images),
        users=_most_kept_off(sums.users),
        width=width,
        periods=tuple(_make_periods(sums.slots, width, utc_offset)),
        events=sums.events,
        logs=logs,
        outside_window=sums.outside_window,
        impossible_time=sums.impossible_time,
    )


def _estimate_savings(sums: ReportSums, waited: float) -> SavingsEstimate | None:
    """Returns None if no copy shows how long one takes."""
    rate = sums.rates.median()
    if not rate:
        return None
    gross = sum(image.kept_off for image in sums.images.values()) / rate
    return SavingsEstimate(gross - waited, gross, rate, sums.rates.count)


def _most_first(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _most_kept_off(groups: dict[str, G]) -> tuple[G, ...]:
    """Those with most bytes kept off come first."""
    return tuple(sorted(groups.values(), key=lambda one: (-one.kept_off, -one.starts, one.name)))


def _sort_nodes(sums: ReportSums) -> tuple[NodeFigures, ...]:
    """Those to look at come first: with failures, then with slow copies."""
    found = (
        msgspec.structs.replace(
            node.figures, rate=node.rates.median(), waits=node.waits.make_wait_stats()
        )
        for node in sums.nodes.values()
        if node.events
    )
    return tuple(sorted(found, key=lambda one: (-one.failed, one.rate or math.inf, one.name)))


def _period_width(first: float, last: float) -> int:
    """Returns the shortest width with which all periods fit into a plot."""
    if not math.isfinite(first):
        return HOUR
    # One more, because the first event need not be at the beginning of a period.
    return next(
        (width for width in WIDTHS if (last - first) / width + 1 <= MAX_PERIODS), WIDTHS[-1]
    )


def _make_periods(
    slots: dict[int, PeriodSums], width: int, utc_offset: int
) -> Iterator[ReportPeriod]:
    """Consecutive periods, also those without events; weeks begin on Monday."""
    sums: dict[int, PeriodSums] = {}
    for quarter, slot in slots.items():
        number = (quarter * QUARTER + utc_offset - FIRST_MONDAY) // width
        sums.setdefault(number, PeriodSums()).add(slot)
    if not sums:
        return
    for number in range(min(sums), max(sums) + 1):
        period = ReportPeriod(start=number * width + FIRST_MONDAY - utc_offset)
        if number in sums:
            period.add(sums[number])
        yield period


def format_json(report: SavingsReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def to_local_time(moment: float, utc_offset: int) -> datetime:
    return datetime.fromtimestamp(moment, timezone(timedelta(seconds=utc_offset)))
