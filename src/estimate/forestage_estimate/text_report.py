"""The figures as text for people, and how a figure is written. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

from forestage_estimate.savings import SavingsFigures, ValueRange

FigureFormat = Callable[[float], str]


def format_size(number: float) -> str:
    """Bytes: `23.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            return f"{number:.{0 if unit == 'B' else 1}f} {unit}"
        number /= 1024
    return f"{number:.1f} PiB"


def format_share(figure: float) -> str:
    return f"{figure:.0%}" if figure in (0, 1) or figure >= 0.095 else f"{figure:.1%}"


def format_count(figure: float) -> str:
    return f"{figure:,.0f}"


def format_hours(figure: float) -> str:
    return f"{figure:,.1f}"


def format_range(figure: ValueRange, format_figure: FigureFormat) -> str:
    """A figure, or from which to which."""
    low, high = format_figure(figure.low), format_figure(figure.high)
    return low if low == high else f"{low} to {high}"


def format_day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def format_known_starts(figures: SavingsFigures) -> str:
    """Which starts the figures are about."""
    all_starts = figures.known + figures.registry + figures.unknown
    known, registry, unknown = (
        _format_part(count, all_starts)
        for count in (figures.known, figures.registry, figures.unknown)
    )
    days = f"{format_day(figures.first)} to {format_day(figures.last)}"
    starts_text = f"{format_count(all_starts)} starts (a job on a node, once for each image)"
    lines = [
        f"{starts_text} of {format_count(figures.jobs)} jobs, {days}:",
        f"  {known} name a path, of {format_count(figures.images)} images;",
        f"  {registry} name an image of a registry, and are left out;",
        f"  {unknown} name none where accounting shows it, and are left out.",
        format_unseen_share(figures),
    ]
    if figures.dropped:
        lines.append(
            f"{format_count(figures.dropped)} lines were no row: command lines with a newline."
        )
    if figures.sized < figures.known:
        lines.append(
            f"The size is known of {format_count(figures.images_sized)} images. What follows is"
            f" about {_format_part(figures.sized, figures.known)} of the starts with a path (run it"
            " as somebody who can see the images, or give --size)."
        )
    return "\n".join(lines)


def format_unseen_share(figures: SavingsFigures) -> str:
    """How many starts with an image are not seen."""
    if figures.unseen is None:
        return (
            f"Of all starts with an image, at most {format_share(figures.most_unseen)} are not seen"
            " (#SBATCH lines, variables). AccountingStoreFlags=job_script lets a sample tell."
        )
    by_scripts = (
        f", by {format_count(figures.sample.scripts)} of their scripts" if figures.sample else ""
    )
    return (
        f"Of all starts with an image, {format_share(figures.unseen)} are not seen"
        f" (#SBATCH lines){by_scripts}."
    )


def _format_part(part: float, whole: float) -> str:
    return f"{format_count(part)} ({format_share(part / whole if whole else 0)})"


def format_text(figures: SavingsFigures) -> str:
    """All of it."""
    return f"{format_known_starts(figures)}\n\n{format_savings(figures)}\n"


def format_savings(figures: SavingsFigures) -> str:
    """What came of it."""
    chosen, all_starts = figures.chosen, figures.known + figures.registry + figures.unknown
    about = (
        f"{format_count(figures.sized)} starts ({format_share(figures.sized / all_starts)} of all)"
    )
    saved_text = f"{format_range(chosen.saved, format_size)}, if a start reads its whole image"
    hits_text = (
        f"{format_range(chosen.hits, format_count)} ({_format_shares(chosen.hits, figures.sized)})"
    )
    lines = [
        f"With a cache of {format_size(chosen.cache)} on each node, of {about}:",
        f"  hits                           {hits_text}",
        f"  read from the file server      {format_range(chosen.read, format_size)}",
        f"  not read from the file server  {saved_text}",
    ]
    if figures.node_hours is not None:
        lines.append(
            f"  node hours not waited          {format_range(figures.node_hours, format_hours)}"
        )
    lines += ["", "month    partition             starts  hits          not read"]
    for group in figures.groups:
        lines.append(
            f"{group.month}  {group.partition[:20]:20}  {format_count(group.starts):>6}"
            f"  {_format_shares(group.hits, group.starts):12}"
            f"  {format_range(group.saved, format_size)}"
        )
    lines += ["", "cache       hits          not read"]
    for result in figures.curve:
        shares = _format_shares(result.hits, figures.sized)
        lines.append(
            f"{format_size(result.cache):10}  {shares:12}"
            f"  {format_range(result.saved, format_size)}"
        )
    return "\n".join(lines)


def _format_shares(hits: ValueRange, starts: int) -> str:
    return format_range(hits.divide_by(starts), format_share)
