"""The figures as one HTML page with two plots, inline SVG, without scripts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from forestage_estimate.savings import PartitionMonth, SavingsFigures, ValueRange
from forestage_estimate.text_report import (
    format_day,
    format_known_starts,
    format_savings,
    format_share,
    format_size,
)

WIDTH, HEIGHT, LEFT_MARGIN, BOTTOM_MARGIN = 640, 240, 80, 40
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f4f4f4; padding: 1rem; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; font-size: 12px; }
.saved { fill: #2a7f62; } .read { fill: #d08c60; } .key { width: 1em; }
.line { fill: none; stroke: #2a7f62; stroke-width: 2; } .axis { stroke: #999; }
"""


def format_page(figures: SavingsFigures) -> str:
    """The page."""
    title = (
        f"What staging would have saved, {format_day(figures.first)} to {format_day(figures.last)}"
    )
    about = escape(format_known_starts(figures))
    keys = f"{_draw_key('saved')} not read {_draw_key('read')} read."
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>
<h1>{title}</h1>
<pre>{about}</pre>
<h2>Hits by the size of a node's cache</h2>
{_draw_hit_curve(figures)}
<p>Where there are two lines, they are those of the largest and of the smallest sizes.</p>
<h2>Bytes by month: not read from the file server, and read</h2>
{_draw_month_bars(figures.groups)}
<p>{keys} A start is taken to read its whole image.</p>
<pre>{escape(format_savings(figures))}</pre>
</html>
"""


def _draw_key(css_class: str) -> str:
    square = f'<rect class="{css_class}" width="12" height="12"/>'
    return f'<svg class="key" viewBox="0 0 12 12">{square}</svg>'


def _draw_frame(shapes: list[str], top_label: str, label: str) -> str:
    floor = HEIGHT - BOTTOM_MARGIN
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
            f'<path class="axis" d="M{LEFT_MARGIN} 10V{floor}H{WIDTH}" fill="none"/>',
            f'<text x="{LEFT_MARGIN - 6}" y="16" text-anchor="end">{escape(top_label)}</text>',
            f'<text x="{LEFT_MARGIN - 6}" y="{floor}" text-anchor="end">0</text>',
            *shapes,
            "</svg>",
        ]
    )


def _scale_height(part: float, whole: float) -> float:
    return (HEIGHT - BOTTOM_MARGIN - 10) * part / whole if whole else 0


def _column_center(index: int, count: int) -> float:
    return LEFT_MARGIN + (WIDTH - LEFT_MARGIN) * (index + 0.5) / count


def _draw_label(x: float, text: str) -> str:
    y = HEIGHT - BOTTOM_MARGIN + 18
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _draw_hit_curve(figures: SavingsFigures) -> str:
    """Shares of hits; with sizes that are a range, an area between two lines."""
    shapes, low, high = [], [], []
    for index, result in enumerate(figures.curve):
        x, hits = _column_center(index, len(figures.curve)), result.hits.divide_by(figures.sized)
        low.append(f"{x:.1f},{HEIGHT - BOTTOM_MARGIN - _scale_height(hits.low, 1):.1f}")
        high.append(f"{x:.1f},{HEIGHT - BOTTOM_MARGIN - _scale_height(hits.high, 1):.1f}")
        shapes.append(_draw_label(x, format_size(result.cache)))
    lines = [low] if low == high else [low, high]  # the largest and the smallest sizes
    shapes += [f'<polyline class="line" points="{" ".join(line)}"/>' for line in lines]
    chosen_share = ValueRange(figures.chosen.hits.low, figures.chosen.hits.high).divide_by(
        figures.sized
    )
    return _draw_frame(
        shapes,
        "100%",
        f"Hits: {format_share(chosen_share.low)} with {format_size(figures.chosen.cache)}",
    )


def _draw_month_bars(groups: Sequence[PartitionMonth]) -> str:
    """A bar for each month; of a range its middle."""
    months: dict[str, tuple[float, float]] = {}
    for group in groups:
        saved, read = months.get(group.month, (0.0, 0.0))
        middles = [(one.low + one.high) / 2 for one in (group.saved, group.read)]
        months[group.month] = (saved + middles[0], read + middles[1])
    largest = max((sum(one) for one in months.values()), default=0)
    shapes = []
    for index, (month, (saved, read)) in enumerate(months.items()):
        x, floor = _column_center(index, len(months)), float(HEIGHT - BOTTOM_MARGIN)
        width = min(60, (WIDTH - LEFT_MARGIN) / len(months) * 0.8)
        for css_class, part in (("saved", saved), ("read", read)):
            height = _scale_height(part, largest)
            floor -= height
            geometry = (
                f'x="{x - width / 2:.1f}" y="{floor:.1f}" width="{width:.1f}" height="{height:.1f}"'
            )
            title = f"<title>{month}: {format_size(part)}</title>"
            shapes.append(f'<rect class="{css_class}" {geometry}>{title}</rect>')
        shapes.append(_draw_label(x, month))
    return _draw_frame(shapes, format_size(largest), "Bytes by month")
