"""The figures as text for people, and how a figure is written. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

from forestage_estimate.figures import Figures, Range

Form = Callable[[float], str]


def size(number: float) -> str:
    """Bytes: `23.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            return f"{number:.{0 if unit == 'B' else 1}f} {unit}"
        number /= 1024
    return f"{number:.1f} PiB"


def share(figure: float) -> str:
    return f"{figure:.0%}" if figure in (0, 1) or figure >= 0.095 else f"{figure:.1%}"


def count(figure: float) -> str:
    return f"{figure:,.0f}"


def hours(figure: float) -> str:
    return f"{figure:,.1f}"


def ranged(figure: Range, form: Form) -> str:
    """A figure, or from which to which."""
    low, high = form(figure.low), form(figure.high)
    return low if low == high else f"{low} to {high}"


def day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def known(figures: Figures) -> str:
    """Which starts the figures are about."""
    every = figures.known + figures.registry + figures.unknown
    days = f"{day(figures.first)} to {day(figures.last)}"
    starts = f"{count(every)} starts (a job on a node, once for each image)"
    lines = [
        f"{starts} of {count(figures.jobs)} jobs, {days}:",
        f"  {_part(figures.known, every)} name a path, of {count(figures.images)} images;",
        f"  {_part(figures.registry, every)} name an image of a registry, and are left out;",
        f"  {_part(figures.unknown, every)} name none where accounting shows it, and are left out.",
        unseen(figures),
    ]
    if figures.dropped:
        lines.append(f"{count(figures.dropped)} lines were no row: command lines with a newline.")
    if figures.sized < figures.known:
        lines.append(
            f"The size is known of {count(figures.images_sized)} images. What follows is about"
            f" {_part(figures.sized, figures.known)} of the starts with a path (run it as somebody"
            " who can see the images, or give --size)."
        )
    return "\n".join(lines)


def unseen(figures: Figures) -> str:
    """How many starts with an image are not seen."""
    if figures.unseen is None:
        return (
            f"Of all starts with an image, at most {share(figures.most_unseen)} are not seen"
            " (#SBATCH lines, variables). AccountingStoreFlags=job_script lets a sample tell."
        )
    by = f", by {count(figures.sample.scripts)} of their scripts" if figures.sample else ""
    return f"Of all starts with an image, {share(figures.unseen)} are not seen (#SBATCH lines){by}."


def _part(part: float, whole: float) -> str:
    return f"{count(part)} ({share(part / whole if whole else 0)})"


def text(figures: Figures) -> str:
    """All of it."""
    return f"{known(figures)}\n\n{found(figures)}\n"


def found(figures: Figures) -> str:
    """What came of it."""
    chosen, every = figures.chosen, figures.known + figures.registry + figures.unknown
    about = f"{count(figures.sized)} starts ({share(figures.sized / every)} of all)"
    saved = f"{ranged(chosen.saved, size)}, if a start reads its whole image"
    hits = f"{ranged(chosen.hits, count)} ({_shares(chosen.hits, figures.sized)})"
    lines = [
        f"With a cache of {size(chosen.cache)} on each node, of {about}:",
        f"  hits                           {hits}",
        f"  read from the file server      {ranged(chosen.read, size)}",
        f"  not read from the file server  {saved}",
    ]
    if figures.node_hours is not None:
        lines.append(f"  node hours not waited          {ranged(figures.node_hours, hours)}")
    lines += ["", "month    partition             starts  hits          not read"]
    for group in figures.groups:
        lines.append(
            f"{group.month}  {group.partition[:20]:20}  {count(group.starts):>6}"
            f"  {_shares(group.hits, group.starts):12}  {ranged(group.saved, size)}"
        )
    lines += ["", "cache       hits          not read"]
    for one in figures.curve:
        shares = _shares(one.hits, figures.sized)
        lines.append(f"{size(one.cache):10}  {shares:12}  {ranged(one.saved, size)}")
    return "\n".join(lines)


def _shares(hits: Range, starts: int) -> str:
    return ranged(hits.share_of(starts), share)
