"""How the report tells numbers: never more than they are. Pure."""

import math

from forestage.report import DAY, Report, moment
from forestage.units import format_size

NONE = "–"
size = format_size


def number(value: int) -> str:
    return f"{value:,}"


def rate(value: float | None) -> str:
    return NONE if not value else f"{size(value)}/s"


def share(value: float | None) -> str:
    """Cut, not rounded: one miss in many is no 100 %."""
    return NONE if value is None else f"{math.floor(value * 1000 + 1e-9) / 10:.1f} %"


def seconds(value: float | None) -> str:
    """What one job waits."""
    if value is None:
        return NONE
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 300 else f"{value / 60:.0f} min"


def node_time(value: float) -> str:
    """What many nodes wait, added up."""
    sign, value = ("−" if value < 0 else ""), abs(value)
    if value < 120:
        return f"{sign}{value:.0f} s"
    if value < 7200:
        return f"{sign}{value / 60:.0f} min"
    hours = value / 3600
    return f"{sign}{hours:,.0f} h" if hours >= 100 else f"{sign}{hours:.1f} h"


def day(when: float, found: Report, width: int) -> str:
    """The beginning of a period, as exact as periods of this many seconds need it."""
    pattern = "%-d %b %H:%M" if width < DAY else "%-d %b"
    return moment(when, found.offset).strftime(
        "%-d %b %Y" if found.width > 7 * DAY and width >= DAY else pattern
    )


def minute(when: float, found: Report) -> str:
    return moment(when, found.offset).strftime("%-d %b %Y, %H:%M")


def zone(offset: int) -> str:
    sign = "−" if offset < 0 else "+"
    return f"UTC{sign}{abs(offset) // 3600:02d}:{abs(offset) % 3600 // 60:02d}"


def period(width: int) -> str:
    """What one bar is."""
    named = {
        3600: "hour",
        6 * 3600: "six hours",
        DAY: "day",
        7 * DAY: "week",
        28 * DAY: "four weeks",
    }
    return named.get(width, "52 weeks")


def plural(count: int, one: str, many: str = "") -> str:
    return f"{number(count)} {one if count == 1 else many or one + 's'}"
