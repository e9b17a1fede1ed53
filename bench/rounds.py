"""Rounds of a bench: whose turn it is in each, and what is told of the figures of all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def rotate_names(names: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the names in the order of this round: each round begins with another. Pure."""
    turn = number % len(names)
    return (*names[turn:], *names[:turn])


def find_spread(values: Sequence[float]) -> list[float]:
    """Return the median of these, the least and the most. Pure."""
    return [statistics.median(values), min(values), max(values)]
