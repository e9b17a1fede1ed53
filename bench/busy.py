"""How busy the machine is, for the line before a bench's last."""

from __future__ import annotations

import os


class Load:
    """Of the machine, from when this was made on: a figure says little without it."""

    def __init__(self) -> None:
        self._start = os.getloadavg()[0]

    def __str__(self) -> str:
        return f"load {self._start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
