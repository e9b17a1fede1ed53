"""Keepers that live, by what they leave of themselves on the node.

/run/forestage/through/<key>/lock   held as long as the keeper lives
                             sock   where it listens
                             state  whose it is; its mtime: the keeper was well then
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from forestage.system import lock, records

PROCESS_NAME = "forestage-keep"  # in ps(1); its servers are SERVER_NAME
SERVER_NAME = "forestage-read"
START = 10.0  # seconds until the first server answers


class State(msgspec.Struct, frozen=True):
    """The file `state`: the keeper, for people; the user it was started for, the file's st_dev."""

    pid: int
    uid: int
    device: int


def states(through: Path) -> list[tuple[Path, State]]:
    """The keepers that live, by their directories. Raises OSError."""
    found = []
    for spot in through.iterdir() if through.exists() else ():
        with contextlib.suppress(FileNotFoundError, records.Damaged):
            if not lock.is_free(spot / "lock"):
                found.append((spot, records.load(spot / "state", State)))
    return found
