"""The figures as one HTML page with two plots, inline SVG, without scripts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from forestage_estimate.figures import Figures, Group, Range
from forestage_estimate.text import day, found, known, share, size

WIDTH, HEIGHT, LEFT, FOOT = 640, 240, 80, 40
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f4f4f4; padding: 1rem; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; font-size: 12px; }
.saved { fill: #2a7f62; } .read { fill: #d08c60; } .key { width: 1em; }
.line { fill: none; stroke: #2a7f62; stroke-width: 2; } .axis { stroke: #999; }
"""


def page(figures: Figures) -> str:
    """The page."""
    title = f"What staging would have saved, {day(figures.first)} to {day(figures.last)}"
    about = escape(known(figures))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>
<h1>{title}</h1>
<pre>{about}</pre>
<h2>Hits by the size of a node's cache</h2>
{_curve(figures)}
<p>Where there are two lines, they are those of the largest and of the smallest sizes.</p>
<h2>Bytes by month: not read from the file server, and read</h2>
{_months(figures.groups)}
<p>{_key("saved")} not read {_key("read")} read. A start is taken to read its whole image.</p>
<pre>{escape(found(figures))}</pre>
</html>
"""


def _key(colour: str) -> str:
    square = f'<rect class="{colour}" width="12" height="12"/>'
    return f'<svg class="key" viewBox="0 0 12 12">{square}</svg>'


def _frame(inner: list[str], top: str, label: str) -> str:
    floor = HEIGHT - FOOT
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
            f'<path class="axis" d="M{LEFT} 10V{floor}H{WIDTH}" fill="none"/>',
            f'<text x="{LEFT - 6}" y="16" text-anchor="end">{escape(top)}</text>',
            f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>',
            *inner,
            "</svg>",
        ]
    )


def _height(part: float, whole: float) -> float:
    return (HEIGHT - FOOT - 10) * part / whole if whole else 0


def _at(number: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT) * (number + 0.5) / count


def _label(x: float, said: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - FOOT + 18}" text-anchor="middle">{escape(said)}</text>'


def _curve(figures: Figures) -> str:
    """Shares of hits; with sizes that are a range, an area between two lines."""
    inner, low, high = [], [], []
    for number, one in enumerate(figures.curve):
        x, hits = _at(number, len(figures.curve)), one.hits.share_of(figures.sized)
        low.append(f"{x:.1f},{HEIGHT - FOOT - _height(hits.low, 1):.1f}")
        high.append(f"{x:.1f},{HEIGHT - FOOT - _height(hits.high, 1):.1f}")
        inner.append(_label(x, size(one.cache)))
    lines = [low] if low == high else [low, high]  # the largest and the smallest sizes
    inner += [f'<polyline class="line" points="{" ".join(line)}"/>' for line in lines]
    ends = Range(figures.chosen.hits.low, figures.chosen.hits.high).share_of(figures.sized)
    return _frame(inner, "100%", f"Hits: {share(ends.low)} with {size(figures.chosen.cache)}")


def _months(groups: Sequence[Group]) -> str:
    """A bar for each month; of a range its middle."""
    months: dict[str, tuple[float, float]] = {}
    for group in groups:
        saved, read = months.get(group.month, (0.0, 0.0))
        middles = [(one.low + one.high) / 2 for one in (group.saved, group.read)]
        months[group.month] = (saved + middles[0], read + middles[1])
    most = max((sum(one) for one in months.values()), default=0)
    inner = []
    for number, (month, (saved, read)) in enumerate(months.items()):
        x, floor = _at(number, len(months)), float(HEIGHT - FOOT)
        width = min(60, (WIDTH - LEFT) / len(months) * 0.8)
        for colour, part in (("saved", saved), ("read", read)):
            tall = _height(part, most)
            floor -= tall
            at = f'x="{x - width / 2:.1f}" y="{floor:.1f}" width="{width:.1f}" height="{tall:.1f}"'
            title = f"<title>{month}: {size(part)}</title>"
            inner.append(f'<rect class="{colour}" {at}>{title}</rect>')
        inner.append(_label(x, month))
    return _frame(inner, size(most), "Bytes by month")
