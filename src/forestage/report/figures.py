"""The report's figures and their rendering as JSON.

`compute` makes a `Report` of running sums. Sizes are in bytes, times in seconds, moments in seconds
since the epoch; `Report` is also the JSON document, so its field names are an interface.
"""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TypeVar

import msgspec

from forestage.report.logs import LogCounts
from forestage.report.sums import QUARTER, Distribution, GroupSums, Slot, Sums, Window

G = TypeVar("G", bound=GroupSums)

HOUR, DAY = 3600, 86400
WIDTHS = (HOUR, 6 * HOUR, DAY, 7 * DAY, 28 * DAY, 364 * DAY)  # seconds of a period
MAX_PERIODS = 72  # thinner bars cannot be told apart
FIRST_MONDAY = 4 * DAY  # after the epoch


class Waits(msgspec.Struct, frozen=True):
    """What starts waited for staging; `median` and `most` are at most 2 % too high.

    95 of 100 waited `most` seconds or less.
    """

    count: int
    median: float | None
    most: float | None


class Through(msgspec.Struct, frozen=True):
    """What reading through was worth.

    Of `steps` that read through, those whose copy was completed began `ahead` seconds before that
    (the median; `seconds` in all). Until then jobs read so many bytes, `straight` of them from the
    source.
    """

    steps: int
    ahead: float | None
    seconds: float
    read: int
    straight: int


class Estimate(msgspec.Struct, frozen=True):
    """Another answer than `saved`, for clusters whose copies are not measured (peers).

    `gross` is what copying all `kept_off` bytes would have taken at `rate`, the median of `copies`
    in bytes per second; `net` is `gross` less all waiting, and may be negative.
    """

    net: float
    gross: float
    rate: float
    copies: int


class Group(msgspec.Struct, frozen=True):
    """Figures of a user, a partition, a node or an image.

    `saved` is in seconds, as `forestage explain` has it (events/saved), of the `measured` starts of
    `local` ones from a copy; None where none was measured.
    """

    name: str
    starts: int
    hits: int
    local: int
    measured: int
    kept_off: int
    saved: float | None


class Image(Group, frozen=True, kw_only=True):
    """Figures of one image path, or of a directory."""

    size: int
    copies: int
    kind: str = "image"


class OneNode(Group, frozen=True, kw_only=True):
    """`rate` is the median of the node's copies in bytes per second; `failed` counts failures."""

    failed: int
    rate: float | None
    waits: Waits


class Period(Slot, kw_only=True):
    """The sums of the `Report.width` seconds from `start` on."""

    start: int


class Report(msgspec.Struct, frozen=True):
    """All figures of a report.

    `first` and `last` are the times of the earliest and latest event; `kept_off` are bytes by how
    they were kept off the shared file system, `evicted` entries by the hook that evicted them,
    `failed` failures by reason, `original` and `excluded` such starts by reason.
    Events outside of the window or at an impossible time are not counted.
    """

    made: float
    window: Window
    first: float | None
    last: float | None
    utc_offset: int
    total: Slot
    hit_ratio: float | None
    kept_off: dict[str, int]
    all: Group
    estimate: Estimate | None
    waits: Waits
    through: Through
    failed: dict[str, int]
    evicted: dict[str, int]
    original: dict[str, int]
    excluded: dict[str, int]
    nodes: tuple[OneNode, ...]
    partitions: tuple[Group, ...]
    images: tuple[Image, ...]
    users: tuple[Group, ...]
    width: int
    periods: tuple[Period, ...]
    events: int
    logs: LogCounts
    outside_window: int
    impossible_time: int


def compute(sums: Sums, logs: LogCounts, utc_offset: int) -> Report:
    total = Slot()
    for slot in sums.slots.values():
        total.add(slot)
    width = _period_width(sums.first, sums.last)
    through = sums.through
    return Report(
        made=round(sums.now),
        window=sums.window,
        first=sums.first if sums.events else None,
        last=sums.last if sums.events else None,
        utc_offset=utc_offset,
        total=total,
        hit_ratio=total.hit_ratio,
        kept_off=sums.kept_off,
        all=Group("", *_numbers(sums.total)),
        estimate=_estimate(sums, total.seconds),
        waits=_waits(sums.waits),
        through=Through(
            through.steps,
            through.ahead.median(),
            through.seconds,
            through.read,
            through.straight,
        ),
        failed=_most_first(sums.failed),
        evicted=dict(sorted(sums.evicted.items())),
        original=_most_first(sums.original),
        excluded=_most_first(sums.excluded),
        nodes=tuple(_nodes(sums)),
        partitions=tuple(_groups(sums.partitions)),
        images=tuple(
            Image(
                path,
                *_numbers(image),
                size=image.size,
                copies=image.copies,
                kind="data" if image.data else "image",
            )
            for path, image in _most_kept_off(sums.images)
        ),
        users=tuple(_groups(sums.users)),
        width=width,
        periods=tuple(_periods(sums.slots, width, utc_offset)),
        events=sums.events,
        logs=logs,
        outside_window=sums.outside_window,
        impossible_time=sums.impossible_time,
    )


def _estimate(sums: Sums, waited: float) -> Estimate | None:
    """Returns None if no copy shows how long one takes."""
    rate = sums.rates.median()
    if not rate:
        return None
    gross = sum(image.kept_off for image in sums.images.values()) / rate
    return Estimate(gross - waited, gross, rate, sums.rates.count)


def _waits(found: Distribution) -> Waits:
    return Waits(found.count, found.median(), found.at(0.95))


def _most_first(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _numbers(sums: GroupSums) -> tuple[int, int, int, int, int, float | None]:
    """The fields of a Group, after its name."""
    saved = sums.saved if sums.measured else None
    return sums.starts, sums.hits, sums.local, sums.measured, sums.kept_off, saved


def _most_kept_off(groups: dict[str, G]) -> list[tuple[str, G]]:
    """Those with most bytes kept off come first."""
    return sorted(groups.items(), key=lambda item: (-item[1].kept_off, -item[1].starts, item[0]))


def _groups(groups: dict[str, GroupSums]) -> Iterator[Group]:
    for name, sums in _most_kept_off(groups):
        yield Group(name, *_numbers(sums))


def _nodes(sums: Sums) -> list[OneNode]:
    """Those to look at come first: with failures, then with slow copies."""
    found = (
        OneNode(
            name,
            *_numbers(node),
            failed=node.failed,
            rate=node.rates.median(),
            waits=_waits(node.waits),
        )
        for name, node in sums.nodes.items()
        if node.events
    )
    return sorted(found, key=lambda one: (-one.failed, one.rate or math.inf, one.name))


def _period_width(first: float, last: float) -> int:
    """Returns the shortest width with which all periods fit into a plot."""
    if not math.isfinite(first):
        return HOUR
    # One more, because the first event need not be at the beginning of a period.
    return next(
        (width for width in WIDTHS if (last - first) / width + 1 <= MAX_PERIODS), WIDTHS[-1]
    )


def _periods(slots: dict[int, Slot], width: int, utc_offset: int) -> Iterator[Period]:
    """Consecutive periods, also those without events; weeks begin on Monday."""
    sums: dict[int, Slot] = {}
    for quarter, slot in slots.items():
        number = (quarter * QUARTER + utc_offset - FIRST_MONDAY) // width
        sums.setdefault(number, Slot()).add(slot)
    if not sums:
        return
    for number in range(min(sums), max(sums) + 1):
        period = Period(start=number * width + FIRST_MONDAY - utc_offset)
        if number in sums:
            period.add(sums[number])
        yield period


def as_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def local_time(moment: float, utc_offset: int) -> datetime:
    return datetime.fromtimestamp(moment, timezone(timedelta(seconds=utc_offset)))
