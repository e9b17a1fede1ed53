"""The report as one HTML page, rendered with Jinja2 from page.html.j2 and page.css.

Names in a report were chosen by users. Every value is escaped by Jinja2, control characters and
characters that change the direction of writing are shown as escapes, and a Content-Security-Policy
on the page forbids scripts and requests, should a name ever get through as markup.

A plot, which the template draws as inline SVG, is one unit wide for each period and 100 units high,
with y growing downward as in SVG. The browser stretches it to any shape, so it holds bars only; all
text is HTML beside it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from forestage.events.reasons import collect_reasons
from forestage.features.report import figure_format as fmt
from forestage.features.report.figures import SavingsReport
from forestage.units import format_size, make_printable

FOLDER = Path(__file__).parent
MAX_ROWS = 15  # of each table
HEIGHT = 100.0
BAR_WIDTH = 0.82  # of a period
MAX_BAR_WIDTH = 0.06  # of the plot, so that a single bar does not fill it
MIN_BAR_HEIGHT = 0.7  # so that the smallest value is seen
COUNT_STEPS = (2, 4, 6, 8, 10)  # even, so that the label at half the height is a whole number


def render_page(report: SavingsReport) -> bytes:
    offset = report.utc_offset
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escape_invisible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": fmt.format_number,
        "size": format_size,
        "rate": fmt.format_rate,
        "share": fmt.format_share,
        "duration": fmt.format_seconds,
        "plural": fmt.format_plural,
        "period": fmt.format_period,
        "zone": fmt.format_utc_offset,
        "day": partial(fmt.format_day, utc_offset=offset),
        "minute": partial(fmt.format_minute, utc_offset=offset),
    }
    html = environment.get_template("page.html.j2").render(
        report=report,
        total=report.total,
        images=report.images[:MAX_ROWS],
        users=report.users[:MAX_ROWS],
        partitions=report.partitions[:MAX_ROWS],
        nodes=report.nodes[:MAX_ROWS],
        plots=make_plots(report),
        plot_height=HEIGHT,
        reason_texts=collect_reasons(),
        css=Markup((FOLDER / "page.css").read_text()),  # noqa: S704 - a file of ours
    )
    return html.encode("utf-8", "backslashreplace")


def _escape_invisible(value: object) -> object:
    """Applied to the value of every expression in the template, before it is escaped."""
    return (
        make_printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )


class PlotSeries(msgspec.Struct, frozen=True):
    """Values of one colour: a field of ReportPeriod, the colour's CSS class, and the legend."""

    field: str
    colour: str
    name: str


class PlotBar(msgspec.Struct, frozen=True):
    colour: str
    x: float
    y: float
    width: float
    height: float


class PlotColumn(msgspec.Struct, frozen=True):
    """What is drawn for one period; the browser shows `title` while the pointer is on it."""

    x: int
    title: str
    rects: tuple[PlotBar, ...]


class BarPlot(msgspec.Struct, frozen=True):
    """All that the template needs of one plot.

    `description` is for screen readers, `scale` holds the labels from the top to zero.
    """

    key: str
    title: str
    description: str
    scale: tuple[str, str, str]
    legend: tuple[PlotSeries, ...]
    columns: tuple[PlotColumn, ...]
    dates: tuple[str, ...]


def make_plots(report: SavingsReport) -> list[BarPlot]:
    """Returns no plot for a report without periods."""
    if not report.periods:
        return []
    ratio = (PlotSeries("hit_ratio", "hit", "hits"),)
    starts = (
        PlotSeries("hit", "hit", "hit"),
        PlotSeries("joined", "joined", "joined"),
        PlotSeries("through", "through", "read through"),
        PlotSeries("waited", "waited", "waited"),
        PlotSeries("shared", "shared", "shared"),
        PlotSeries("original", "original", "in vain"),
    )
    traffic = (
        PlotSeries("kept_off", "hit", "kept off it"),
        PlotSeries("read", "waited", "read from it"),
    )
    evicted = (PlotSeries("evicted", "original", "evicted"),)
    return [
        _make_bar_plot("ratio", "Hit ratio", ratio, fmt.format_share, lambda _: 1.0, report),
        _make_bar_plot("starts", "Starts", starts, fmt.format_number, round_up_count, report),
        _make_bar_plot("bytes", "Shared file system", traffic, format_size, round_up_size, report),
        *(
            [
                _make_bar_plot(
                    "evictions",
                    "Entries evicted",
                    evicted,
                    fmt.format_number,
                    round_up_count,
                    report,
                )
            ]
            if report.evicted
            else []
        ),
    ]


def round_up_count(largest: float) -> float:
    """Returns an even round number that is not below `largest`."""
    steps = (step * 10.0**power for power in count() for step in COUNT_STEPS)
    return next(step for step in steps if step >= largest)


def round_up_size(largest: float) -> float:
    """Returns a power of two that is not below `largest` bytes."""
    return float(1 << max(0, int(largest) - 1).bit_length())


def _make_bar_plot(
    key: str,
    title: str,
    series: tuple[PlotSeries, ...],
    label: Callable[[Any], str],
    scale: Callable[[float], float],
    report: SavingsReport,
) -> BarPlot:
    """Bars whose series are stacked in their order, from below."""

    def listed(of: object) -> str:
        return ", ".join(f"{one.name} {label(getattr(of, one.field))}" for one in series)

    periods = report.periods
    stacks = [[getattr(period, one.field) or 0 for one in series] for period in periods]
    top = scale(max(map(sum, stacks)))
    width = min(BAR_WIDTH, MAX_BAR_WIDTH * len(stacks))
    columns = tuple(
        PlotColumn(
            x,
            f"{fmt.format_period_start(period.start, report)}: {listed(period)}",
            tuple(_stack_bars(x, stack, series, width, top)),
        )
        for x, (period, stack) in enumerate(zip(periods, stacks, strict=True))
    )
    last = len(periods) - 1
    # With fewer than five periods the date in the middle would be of no use.
    shown = (0, last // 2, last) if last >= 4 else (0, last) if last else (0,)
    in_all = listed(report.total)
    return BarPlot(
        key=key,
        title=title,
        description=f"Bars, one for each {fmt.format_period(report.width)}. In all: {in_all}.",
        scale=(label(top), label(top / 2), "0"),
        legend=series if len(series) > 1 else (),
        columns=columns,
        dates=tuple(fmt.format_period_start(periods[at].start, report) for at in shown),
    )


def _stack_bars(
    x: int, stack: list[float], series: tuple[PlotSeries, ...], width: float, top: float
) -> Iterator[PlotBar]:
    below = 0.0
    for one, value in zip(series, stack, strict=True):
        if value:
            height = max(HEIGHT * value / top, MIN_BAR_HEIGHT)
            y = max(0.0, HEIGHT - below - height)
            yield PlotBar(one.colour, x + (1 - width) / 2, y, width, height)
        below += HEIGHT * value / top
