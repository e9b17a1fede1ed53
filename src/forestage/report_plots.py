"""The report's plots: inline SVG, stretched to any width; all words are HTML beside it. Pure.

A plot is as wide as there are periods and 100 high. It is stretched without regard to its shape,
so there is no text and no circle in it.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec

from forestage import report_words as say
from forestage.report import Period, Report
from forestage.report_markup import Markup, join, tag

HEIGHT = 100
GAP = 0.18  # of a period, between two bars
THICK = 0.06  # of the plot, the most that one bar takes
COUNTS = (2, 4, 6, 8, 10)  # halves are whole numbers
BYTES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Series(msgspec.Struct, frozen=True):
    """Bars of one colour: a field of Period, the class of its colour, and its name."""

    field: str
    colour: str
    name: str


class Plot(msgspec.Struct, frozen=True):
    """`series` are stacked from below; `told` says a value and `top` finds the scale's end."""

    key: str
    title: str
    series: tuple[Series, ...]
    told: Callable[[float], str]
    top: Callable[[float], float]


def count_top(most: float) -> float:
    """The end of a scale of counts; its half is a whole number."""
    return _above(most, [float(step * 10**power) for power in range(20) for step in COUNTS])


def size_top(most: float) -> float:
    return _above(most, [float(step << 10 * power) for power in range(7) for step in BYTES])


def _above(most: float, steps: list[float]) -> float:
    return next((step for step in steps if step >= most), most)


def bars(plot: Plot, found: Report) -> Markup:
    values = [[getattr(one, s.field) for s in plot.series] for one in found.periods]
    top = plot.top(max(map(sum, values)))
    drawn = []
    for at, (period, stack) in enumerate(zip(found.periods, values, strict=True)):
        told = ", ".join(
            f"{s.name} {plot.told(value)}" for s, value in zip(plot.series, stack, strict=True)
        )
        drawn.append(
            tag(
                "g",
                tag("title", f"{say.day(period.start, found, found.width)}: {told}"),
                tag("rect", class_="hover", x=at, y=0, width=1, height=HEIGHT),
                *_stack(at, stack, top, len(values), plot.series),
            )
        )
    total = ", ".join(
        f"{s.name} {plot.told(sum(stack[n] for stack in values))}"
        for n, s in enumerate(plot.series)
    )
    about = f"Bars, one for each {say.period(found.width)}. In all: {total}."
    scale = (plot.told(top), plot.told(top / 2), "0")
    return _figure(plot.key, plot.title, about, scale, join(*drawn), found, plot.series)


def _stack(
    at: int, stack: Sequence[float], top: float, number: int, series: tuple[Series, ...]
) -> list[Markup]:
    width = min(1 - GAP, THICK * number)
    drawn, below = [], 0.0
    for one, value in zip(series, stack, strict=True):
        height = HEIGHT * value / top
        if value:
            # What is there is seen, however little it is.
            tall = max(height, 0.7)
            drawn.append(
                tag(
                    "rect",
                    class_=one.colour,
                    x=f"{at + (1 - width) / 2:.3f}",
                    y=f"{max(0.0, HEIGHT - below - tall):.2f}",
                    width=f"{width:.3f}",
                    height=f"{tall:.2f}",
                )
            )
        below += height
    return drawn


def ratio(found: Report) -> Markup:
    """The hit ratio as steps, with gaps where nothing was started."""
    drawn: list[Markup] = []
    held = list(enumerate(found.periods))
    for is_there, run in groupby(held, key=lambda one: one[1].hit_ratio is not None):
        if is_there:
            drawn += _steps(list(run))
    for at, period in held:
        told = f"{say.day(period.start, found, found.width)}: {say.share(period.hit_ratio)}"
        drawn.append(
            tag(
                "g",
                tag("title", told),
                tag("rect", class_="hover", x=at, y=0, width=1, height=HEIGHT),
            )
        )
    about = (
        f"A line of steps, one for each {say.period(found.width)}, from 0 to 100 percent."
        f" In all: {say.share(found.hit_ratio)}."
    )
    scale = ("100 %", "50 %", "0")
    return _figure("ratio", "Hit ratio", about, scale, join(*drawn), found, ())


def _steps(run: list[tuple[int, Period]]) -> list[Markup]:
    line = [
        f"{x},{HEIGHT * (1 - (period.hit_ratio or 0.0)):.2f}"
        for at, period in run
        for x in (at, at + 1)
    ]
    first, end = run[0][0], run[-1][0] + 1
    area = " ".join((f"{first},{HEIGHT}", *line, f"{end},{HEIGHT}"))
    return [
        tag("polygon", class_="under", points=area),
        tag("polyline", class_="line", points=" ".join(line)),
    ]


def _figure(
    key: str,
    title: str,
    about: str,
    scale: tuple[str, str, str],
    drawn: Markup,
    found: Report,
    series: tuple[Series, ...],
) -> Markup:
    number = len(found.periods)
    grid = [
        tag("line", class_="grid", x1=0, x2=number, y1=y, y2=y) for y in (0, HEIGHT / 2, HEIGHT)
    ]
    svg = tag(
        "svg",
        tag("title", title, id=f"{key}-title"),
        tag("desc", about, id=f"{key}-desc"),
        *grid,
        drawn,
        viewBox=f"0 0 {number} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
    )
    marks = tag("div", *(tag("span", one) for one in scale), class_="scale", aria_hidden="true")
    keys = [tag("li", tag("i", class_=one.colour), one.name) for one in series]
    legend = tag("ul", *keys, class_="legend") if len(series) > 1 else Markup("")
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), legend),
        tag("div", marks, svg, class_="frame"),
        tag("div", *_days(found), class_="days", aria_hidden="true"),
    )


def _days(found: Report) -> list[Markup]:
    last = len(found.periods) - 1
    # Five or more have a middle worth naming.
    picked = (0, last // 2, last) if last >= 4 else (0, last) if last else (0,)
    return [tag("span", say.day(found.periods[at].start, found, found.width)) for at in picked]
