"""How much start-up time did forestage save, and how do we know? The figures of `report`. Pure."""

import csv
import io
import math
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import msgspec

from forestage.report_logs import Read
from forestage.report_sums import (
    OTHERS,
    QUARTER,
    SIZES,
    ImageSums,
    Left,
    SizeSums,
    Slot,
    Spread,
    Sums,
    Window,
)

HOUR, DAY = 3600, 86400
WIDTHS = (HOUR, 6 * HOUR, DAY, 7 * DAY, 28 * DAY, 364 * DAY)  # seconds of a period
PERIODS = 72  # at most; more would be too thin to see
MONDAY = 4 * DAY  # the epoch's first
TOP = 15  # images that a page shows
ENOUGH = 3  # copies of an image, after which their own rate is taken for it
KINDS = ("hit", "joined", "cold", "original", "aside")


class Wait(msgspec.Struct, frozen=True):
    """What jobs waited, in seconds; the figures are at most 2 % above the true ones."""

    number: int
    median: float | None
    most: float | None  # 95 of 100 waited no longer


class Saved(msgspec.Struct, frozen=True):
    """Seconds of nodes' time, an estimate: `spared` bytes at the copies' pace, less all waiting.

    `rate` is the median of `copies`, in bytes per second.
    """

    seconds: float
    gross: float
    rate: float
    copies: int


class Image(msgspec.Struct, frozen=True):
    path: str
    size: int
    starts: int
    hits: int
    copies: int
    kept_off: int
    saved: float | None


class Size(msgspec.Struct, frozen=True):
    """Copies of images of at least `above` and less than `below` bytes."""

    above: int
    below: int | None
    copies: int
    took: float | None
    took_most: float | None
    rate: float | None


class Period(msgspec.Struct, frozen=True):
    """From `start`, for `Report.width` seconds; counts of starts, and bytes."""

    start: int
    hit: int
    joined: int
    cold: int
    original: int
    aside: int
    kept_off: int
    read: int
    evicted: int
    waited: float

    @property
    def hit_ratio(self) -> float | None:
        return ratio(self.hit, self.hit + self.joined + self.cold + self.original)


class Report(msgspec.Struct, frozen=True):
    """What is told, and the JSON document: sizes in bytes, times in seconds since the epoch.

    `first` and `last` are those of events; `offset` is the seconds that days are before UTC's.
    """

    made: float
    window: Window
    first: float | None
    last: float | None
    offset: int
    nodes: int
    starts: dict[str, int]
    hit_ratio: float | None
    kept_off: dict[str, int]
    read_bytes: int
    waited: float
    saved: Saved | None
    warm: Wait
    cold: Wait
    evicted: dict[str, int]
    reasons: dict[str, int]
    images: tuple[Image, ...]
    sizes: tuple[Size, ...]
    width: int
    periods: tuple[Period, ...]
    events: int
    logs: Read
    left: Left

    @property
    def served(self) -> int:
        """Starts for which staging was tried."""
        return sum(self.starts[kind] for kind in KINDS if kind != "aside")


def report(sums: Sums, logs: Read, offset: int) -> Report:
    """`offset`: seconds that the reader's days begin before UTC's."""
    total = Slot()
    for slot in sums.slots.values():
        total.take(slot)
    width = fitting(sums.first, sums.last)
    starts = {kind: getattr(total, kind) for kind in KINDS}
    served = total.hit + total.joined + total.cold + total.original
    return Report(
        made=round(sums.now),
        window=sums.window,
        first=sums.first if sums.events else None,
        last=sums.last if sums.events else None,
        offset=offset,
        nodes=len(sums.nodes),
        starts=starts,
        hit_ratio=ratio(total.hit, served),
        kept_off=sums.spared,
        read_bytes=total.read,
        waited=total.waited,
        saved=saved(sums, total.waited),
        warm=_wait(sums.warm),
        cold=_wait(sums.cold),
        evicted=sums.evicted,
        reasons=dict(sorted(sums.reasons.items(), key=lambda one: (-one[1], one[0]))),
        images=tuple(_images(sums)),
        sizes=tuple(_sizes(sums.sizes)),
        width=width,
        periods=tuple(periods(sums.slots, width, offset)),
        events=sums.events,
        logs=logs,
        left=sums.left,
    )


def ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def saved(sums: Sums, waited: float) -> Saved | None:
    """What it would have taken to copy the images that starts found here already, less all waiting.

    None where no copy tells how fast it would have been.
    """
    rate = sums.rates.median()
    if not rate:
        return None
    gross = sum(image.spared / _rate(image, rate) for image in sums.images.values())
    return Saved(gross - waited, gross, rate, sums.rates.number)


def _rate(image: ImageSums, rate: float) -> float:
    own = image.rates.median() if image.rates.number >= ENOUGH else None
    return own or rate


def _wait(spread: Spread) -> Wait:
    return Wait(spread.number, spread.median(), spread.at(0.95))


def _images(sums: Sums) -> Iterator[Image]:
    """Those of which most bytes were kept off; what was not told apart comes last."""
    rate = sums.rates.median()
    order = sorted(
        sums.images.items(),
        key=lambda one: (one[0] == OTHERS, -one[1].spared, -one[1].starts, one[0]),
    )
    for path, image in order:
        mine = image.spared / _rate(image, rate) - image.waited if rate else None
        yield Image(path, image.size, image.starts, image.hits, image.copies, image.spared, mine)


def _sizes(found: tuple[SizeSums, ...]) -> Iterator[Size]:
    for above, below, one in zip((0, *SIZES), (*SIZES, None), found, strict=True):
        took = one.took
        yield Size(above, below, one.copies, took.median(), took.at(0.95), one.rates.median())


def fitting(first: float, last: float) -> int:
    """Seconds of a period, so that there are neither too many nor too few."""
    if not math.isfinite(first):
        return HOUR
    # One more: the first and the last need not begin with a period.
    return next((width for width in WIDTHS if (last - first) / width + 1 <= PERIODS), WIDTHS[-1])


def periods(slots: dict[int, Slot], width: int, offset: int) -> Iterator[Period]:
    """One after the other, those in which nothing happened too."""
    found: dict[int, Slot] = {}
    for number, slot in slots.items():
        place = (number * QUARTER + offset - MONDAY) // width
        found.setdefault(place, Slot()).take(slot)
    if not found:
        return
    for place in range(min(found), max(found) + 1):
        slot = found.get(place, Slot())
        yield Period(place * width + MONDAY - offset, **msgspec.structs.asdict(slot))


def as_json(found: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def as_csv(found: Report) -> bytes:
    """A row for each period. No name that a user chose is in it: spreadsheets take `=` for more."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = Period.__struct_fields__[1:]
    writer.writerow(("start", *names, "hit_ratio"))
    for period in found.periods:
        share = "" if period.hit_ratio is None else f"{period.hit_ratio:.4f}"
        when = moment(period.start, found.offset).isoformat()
        writer.writerow((when, *(getattr(period, name) for name in names), share))
    return out.getvalue().encode()


def moment(when: float, offset: int) -> datetime:
    """As the reader's clock shows it."""
    return datetime.fromtimestamp(when, timezone(timedelta(seconds=offset)))
