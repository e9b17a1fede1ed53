"""Numbers and times as the page shows them, never better than they are."""

import math

from forestage.features.report.figures import DAY, HOUR, SavingsReport, to_local_time
from forestage.units import format_size

NO_VALUE = "–"

_PERIODS = {
    HOUR: "hour",
    6 * HOUR: "six hours",
    DAY: "day",
    7 * DAY: "week",
    28 * DAY: "four weeks",
}


def format_number(value: float) -> str:
    return f"{round(value):,}"


def format_rate(value: float | None) -> str:
    """Bytes per second."""
    return NO_VALUE if not value else f"{format_size(value)}/s"


def format_share(value: float | None) -> str:
    """Percent, cut and not rounded: with one miss in a million hits it is not 100 %."""
    return NO_VALUE if value is None else f"{math.floor(value * 1000 + 1e-9) / 10:.1f} %"


def format_seconds(value: float | None) -> str:
    """Seconds that jobs wait; a sum over nodes may be negative."""
    if value is None:
        return NO_VALUE
    sign, value = ("−" if value < 0 else ""), abs(value)
    if value < 0.1:
        return f"{sign}{value * 1000:.0f} ms"
    if value < 120:
        return f"{sign}{value:.1f} s" if value < 10 else f"{sign}{value:.0f} s"
    if value < 7200:
        return f"{sign}{value / 60:.0f} min"
    hours = value / 3600
    return f"{sign}{hours:,.0f} h" if hours >= 100 else f"{sign}{hours:.1f} h"


def format_day(moment: float, utc_offset: int) -> str:
    return to_local_time(moment, utc_offset).strftime("%-d %b %Y")


def format_minute(moment: float, utc_offset: int) -> str:
    return to_local_time(moment, utc_offset).strftime("%-d %b %Y, %H:%M")


def format_period_start(moment: float, report: SavingsReport) -> str:
    """As exact as the width of the report's periods requires, without the year if it is clear."""
    if report.width < DAY:
        pattern = "%-d %b %H:%M"
    else:
        pattern = "%-d %b %Y" if report.width > 7 * DAY else "%-d %b"
    return to_local_time(moment, report.utc_offset).strftime(pattern)


def format_utc_offset(utc_offset: int) -> str:
    sign = "−" if utc_offset < 0 else "+"
    return f"UTC{sign}{abs(utc_offset) // 3600:02d}:{abs(utc_offset) % 3600 // 60:02d}"


def format_period(width: int) -> str:
    return _PERIODS.get(width, "52 weeks")


def format_plural(count: int, one: str, many: str = "") -> str:
    return f"{format_number(count)} {one if count == 1 else many or one + 's'}"
