"""What every bench says: how long it takes, before; how busy the machine was, on its last line."""

from __future__ import annotations

import argparse
import os
import sys


class BenchOptions(argparse.ArgumentParser):
    """The options of bench/`name`; `text` is what it measures, `takes` how long that is."""

    def __init__(self, name: str, text: str | None, takes: str) -> None:
        super().__init__(
            prog=f"bench/{name}",
            description=text,
            epilog=f"Takes {takes}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.takes = takes

    def begin(self) -> argparse.Namespace:
        """The options; who waits at a terminal reads how long."""
        options = self.parse_args()
        if sys.stderr.isatty():
            print(f"{self.prog}: takes {self.takes}", file=sys.stderr)
        return options


class MachineLoad:
    """Of the machine, from when this was made on: a figure says little without it."""

    def __init__(self) -> None:
        self._start = os.getloadavg()[0]

    def last(self, figures: str) -> str:
        """A bench's last line."""
        return f"{figures} load={self._start:.1f}-{os.getloadavg()[0]:.1f}"
