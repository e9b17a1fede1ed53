"""The report's figures and their rendering as JSON.

`compute` makes a `Report` of running sums. Sizes are in bytes, times in seconds, moments in seconds
since the epoch; `Report` is also the JSON document, so its field names are an interface.
"""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import msgspec

from forestage.report.logs import LogCounts
from forestage.report.sums import (
    QUARTER,
    Slot,
    Sums,
    Window,
)

HOUR, DAY = 3600, 86400
WIDTHS = (HOUR, 6 * HOUR, DAY, 7 * DAY, 28 * DAY, 364 * DAY)  # seconds of a period
MAX_PERIODS = 72  # thinner bars cannot be told apart
FIRST_MONDAY = 4 * DAY  # after the epoch


class Waits(msgspec.Struct, frozen=True):
    """How long jobs waited; the median is at most 2 % too high."""

    count: int
    median: float | None


class Savings(msgspec.Struct, frozen=True):
    """An estimate of the start-up time that staging saved, summed over nodes.

    `gross` is what copying all `kept_off` bytes would have taken at `rate`, the median of `copies`
    in bytes per second; `net` is `gross` less all waiting, and may be negative.
    """

    net: float
    gross: float
    rate: float
    copies: int


class Image(msgspec.Struct, frozen=True):
    """Figures of one image path; `saved` is the net estimate in seconds."""

    path: str
    size: int
    starts: int
    hits: int
    copies: int
    kept_off: int
    saved: float | None
    kind: str = "image"


class Person(msgspec.Struct, frozen=True):
    """Figures of one user.

    `saved` is, in seconds, what their images' own reading from the source would have taken, less
    all that they waited; None where no start was measured. Of `local` starts `measured` were.
    """

    user: str
    starts: int
    hits: int
    local: int
    measured: int
    kept_off: int
    saved: float | None


class Period(Slot, kw_only=True):
    """The sums of the `Report.width` seconds from `start` on."""

    start: int


class Report(msgspec.Struct, frozen=True):
    """All figures of a report.

    `first` and `last` are the times of the earliest and latest event; `kept_off` are bytes by how
    they were kept off the shared file system, `evicted` entries by the hook that evicted them.
    Events outside of the window or at an impossible time are not counted.
    """

    made: float
    window: Window
    first: float | None
    last: float | None
    utc_offset: int
    nodes: int
    total: Slot
    hit_ratio: float | None
    kept_off: dict[str, int]
    savings: Savings | None
    warm: Waits
    cold: Waits
    evicted: dict[str, int]
    reasons: dict[str, int]
    images: tuple[Image, ...]
    users: tuple[Person, ...]
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
    return Report(
        made=round(sums.now),
        window=sums.window,
        first=sums.first if sums.events else None,
        last=sums.last if sums.events else None,
        utc_offset=utc_offset,
        nodes=len(sums.nodes),
        total=total,
        hit_ratio=total.hit_ratio,
        kept_off=sums.kept_off,
        savings=_savings(sums, total.seconds),
        warm=Waits(sums.warm.count, sums.warm.median()),
        cold=Waits(sums.cold.count, sums.cold.median()),
        evicted=dict(sorted(sums.evicted.items())),
        reasons=dict(sorted(sums.reasons.items(), key=lambda item: (-item[1], item[0]))),
        images=tuple(_images(sums)),
        users=tuple(_users(sums)),
        width=width,
        periods=tuple(_periods(sums.slots, width, utc_offset)),
        events=sums.events,
        logs=logs,
        outside_window=sums.outside_window,
        impossible_time=sums.impossible_time,
    )


def _savings(sums: Sums, waited: float) -> Savings | None:
    """Returns None if no copy shows how long one takes."""
    rate = sums.rates.median()
    if not rate:
        return None
    gross = sum(image.kept_off for image in sums.images.values()) / rate
    return Savings(gross - waited, gross, rate, sums.rates.count)


def _images(sums: Sums) -> Iterator[Image]:
    """Those with most bytes kept off come first."""
    rate = sums.rates.median()
    for path, image in sorted(
        sums.images.items(),
        key=lambda item: (-item[1].kept_off, -item[1].starts, item[0]),
    ):
        saved = image.kept_off / rate - image.waited if rate else None
        kind = "data" if image.data else "image"
        numbers = (image.size, image.starts, image.hits, image.copies, image.kept_off)
        yield Image(path, *numbers, saved, kind)


def _users(sums: Sums) -> Iterator[Person]:
    """Those with most bytes kept off come first."""
    for name, user in sorted(
        sums.users.items(), key=lambda item: (-item[1].kept_off, -item[1].starts, item[0])
    ):
        numbers = (user.starts, user.hits, user.local, user.measured, user.kept_off)
        yield Person(name, *numbers, user.baseline - user.waited if user.measured else None)


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
