"""Geometry and labels of the report's plots, which the page's template draws as inline SVG.

A plot is one unit wide for each period and 100 units high, with y growing downward as in SVG. The
browser stretches it to any shape, so it holds bars and lines only; all text is HTML beside it.
"""

from collections.abc import Callable, Iterator
from itertools import groupby

import msgspec

from forestage.report import format as fmt
from forestage.report.figures import Period, Report
from forestage.units import format_size

HEIGHT = 100.0
BAR_WIDTH = 0.82  # of a period
MAX_BAR_WIDTH = 0.06  # of the plot, so that a single bar does not fill it
MIN_BAR_HEIGHT = 0.7  # so that the smallest value is seen
COUNT_STEPS = (2, 4, 6, 8, 10)  # even, so that the label at half the height is a whole number
SIZE_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Series(msgspec.Struct, frozen=True):
    """Values of one colour: a field of Period, the CSS class of the colour, and the legend."""

    field: str
    colour: str
    name: str


class Rect(msgspec.Struct, frozen=True):
    colour: str
    x: float
    y: float
    width: float
    height: float


class Point(msgspec.Struct, frozen=True):
    x: int
    y: float


class Column(msgspec.Struct, frozen=True):
    """What is drawn for one period; the browser shows `title` while the pointer is on it."""

    x: int
    title: str
    rects: tuple[Rect, ...] = ()


class Plot(msgspec.Struct, frozen=True):
    """All that the template needs of one plot.

    `description` is for screen readers, `scale` holds the labels from the top to zero, `lines` are
    drawn as steps with the area below filled.
    """

    key: str
    title: str
    description: str
    scale: tuple[str, str, str]
    legend: tuple[Series, ...]
    columns: tuple[Column, ...]
    dates: tuple[str, ...]
    lines: tuple[tuple[Point, ...], ...] = ()


def all_plots(report: Report) -> list[Plot]:
    """Returns no plot for a report without periods."""
    if not report.periods:
        return []
    starts = (
        Series("hit", "hit", "hit"),
        Series("joined", "joined", "joined"),
        Series("cold", "cold", "cold"),
        Series("original", "original", "original path"),
    )
    traffic = (Series("kept_off", "hit", "kept off it"), Series("read", "cold", "read from it"))
    evicted = (Series("evicted", "original", "evicted"),)
    return [
        _hit_ratio(report),
        _bars("starts", "Starts", starts, fmt.number, count_scale, report),
        _bars("bytes", "Shared file system", traffic, format_size, size_scale, report),
        _bars("evictions", "Entries evicted", evicted, fmt.number, count_scale, report),
    ]


def count_scale(largest: float) -> float:
    """Returns an even round number that is not below `largest`."""
    return _scale(largest, [step * 10.0**power for power in range(20) for step in COUNT_STEPS])


def size_scale(largest: float) -> float:
    """Returns a power of two that is not below `largest` bytes."""
    return _scale(largest, [float(step << 10 * power) for power in range(7) for step in SIZE_STEPS])


def _scale(largest: float, steps: list[float]) -> float:
    return next((step for step in steps if step >= largest), largest)


def _bars(
    key: str,
    title: str,
    series: tuple[Series, ...],
    label: Callable[[float], str],
    scale: Callable[[float], float],
    report: Report,
) -> Plot:
    """Bars whose series are stacked in their order, from below."""

    def listed(values: list[int]) -> str:
        return ", ".join(
            f"{one.name} {label(value)}" for one, value in zip(series, values, strict=True)
        )

    stacks = [[getattr(period, one.field) for one in series] for period in report.periods]
    top = scale(max(map(sum, stacks)))
    width = min(BAR_WIDTH, MAX_BAR_WIDTH * len(stacks))
    columns = tuple(
        Column(
            x,
            f"{fmt.period_start(period.start, report)}: {listed(stack)}",
            tuple(_stacked(x, stack, series, width, top)),
        )
        for x, (period, stack) in enumerate(zip(report.periods, stacks, strict=True))
    )
    totals = listed([sum(values) for values in zip(*stacks, strict=True)])
    return Plot(
        key=key,
        title=title,
        description=f"Bars, one for each {fmt.period(report.width)}. In all: {totals}.",
        scale=(label(top), label(top / 2), "0"),
        legend=series if len(series) > 1 else (),
        columns=columns,
        dates=_dates(report),
    )


def _stacked(
    x: int, stack: list[int], series: tuple[Series, ...], width: float, top: float
) -> Iterator[Rect]:
    below = 0.0
    for one, value in zip(series, stack, strict=True):
        if value:
            height = max(HEIGHT * value / top, MIN_BAR_HEIGHT)
            y = max(0.0, HEIGHT - below - height)
            yield Rect(one.colour, x + (1 - width) / 2, y, width, height)
        below += HEIGHT * value / top


def _hit_ratio(report: Report) -> Plot:
    """Steps, with a gap where there was no start."""
    description = (
        f"A line of steps, one for each {fmt.period(report.width)}, from 0 to 100 percent."
        f" In all: {fmt.share(report.hit_ratio)}."
    )
    return Plot(
        key="ratio",
        title="Hit ratio",
        description=description,
        scale=("100 %", "50 %", "0"),
        legend=(),
        columns=tuple(
            Column(x, f"{fmt.period_start(one.start, report)}: {fmt.share(one.hit_ratio)}")
            for x, one in enumerate(report.periods)
        ),
        dates=_dates(report),
        lines=tuple(_lines(report.periods)),
    )


def _lines(periods: tuple[Period, ...]) -> Iterator[tuple[Point, ...]]:
    ratios = [(x, period.hit_ratio) for x, period in enumerate(periods)]
    for is_gap, run in groupby(ratios, key=lambda pair: pair[1] is None):
        if not is_gap:
            yield tuple(
                Point(end, HEIGHT * (1 - (ratio or 0.0))) for x, ratio in run for end in (x, x + 1)
            )


def _dates(report: Report) -> tuple[str, ...]:
    last = len(report.periods) - 1
    # With fewer than five periods the date in the middle would be of no use.
    shown = (0, last // 2, last) if last >= 4 else (0, last) if last else (0,)
    return tuple(fmt.period_start(report.periods[at].start, report) for at in shown)
