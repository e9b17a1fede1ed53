"""Reads event logs for `forestage report`: many, large, damaged, or given twice."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from forestage import events
from forestage.errors import NotFound
from forestage.events import Event
from forestage.report_sums import Sums

STDIN = "-"
OLDER = ".1"  # what the log is called once it was full


class Read(msgspec.Struct):
    """Logs, lines that are no event, and logs that were given before."""

    logs: int = 0
    damaged: int = 0
    twice: int = 0


def of_node(log: Path) -> list[str]:
    """This node's logs, as far as there are any."""
    both = (log.with_name(log.name + OLDER), log)
    return [str(path) for path in both if path.exists()]


def read(names: Iterable[str], sums: Sums) -> Read:
    """Adds every event. Raises NotFound, and OSError where a log cannot be read.

    A log that moves on while it is read may lack its newest events, never has one twice.
    """
    done = Read()
    firsts: set[Event] = set()
    for name in sorted(set(names), key=_in_order):
        with _opened(name) as log:
            _one(log, name, sums, firsts, done)
    return done


def _in_order(name: str) -> tuple[str, bool]:
    """A node's older log before its newer one: a step is told from its Prolog's event."""
    return name.removesuffix(OLDER), not name.endswith(OLDER)


def _one(log: BinaryIO, name: str, sums: Sums, firsts: set[Event], done: Read) -> None:
    first: Event | None = None
    for event in events.each(log):
        if event is None:
            done.damaged += 1
            continue
        if first is None:
            # Under another name, or a copy of it: no two logs begin with the same event.
            first = event
            if first in firsts:
                done.twice += 1
                return
            firsts.add(first)
        sums.add(event, name)
    done.logs += 1


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """As the admin names it: unlike in the node's own log, a link or a pipe is fine."""
    if name == STDIN:
        yield sys.stdin.buffer
        return
    try:
        log = Path(name).open("rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        raise NotFound(f"{name} is not there", "name event logs, or none for this node's") from None
    with log:
        yield log
