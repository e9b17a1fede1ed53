"""Event logs of many nodes as input: large, damaged, rotated, or given more than once."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from forestage import events
from forestage.errors import NotFoundError
from forestage.events import EventRecord
from forestage.features.report.sums import ReportSums

STDIN = "-"
ROTATED = ".1"  # suffix of the log that was full


class LogCounts(msgspec.Struct):
    """How many logs were read, how many were skipped as duplicates, and how many lines were bad."""

    logs: int = 0
    duplicates: int = 0
    damaged_lines: int = 0


def list_node_logs(log: Path) -> list[str]:
    """Returns the names of this node's current and rotated log, as far as they exist."""
    return [str(path) for path in (log.with_name(log.name + ROTATED), log) if path.exists()]


def read_logs(names: Iterable[str], sums: ReportSums) -> LogCounts:
    """Adds the events of all logs to `sums`; raises NotFoundError or OSError.

    A log that is rotated meanwhile may lack its newest events, but no event is added twice.
    """
    counts = LogCounts()
    first_events: set[EventRecord] = set()
    for name in sorted(set(names), key=_log_sort_key):
        with _open_log(name) as log:
            _read_log(log, name, sums, first_events, counts)
    return counts


def _log_sort_key(name: str) -> tuple[str, bool]:
    """A node's rotated log comes first: it may hold the Prologs of the newer log's steps."""
    return name.removesuffix(ROTATED), not name.endswith(ROTATED)


def _read_log(
    log: BinaryIO, name: str, sums: ReportSums, first_events: set[EventRecord], counts: LogCounts
) -> None:
    is_first = True
    for event in events.decode_lines(log):
        if event is None:
            counts.damaged_lines += 1
            continue
        if is_first:
            # No two logs begin with the same event, so this is the same log by another name, or a
            # copy of it. The inode would not show the copy.
            if event in first_events:
                counts.duplicates += 1
                return
            first_events.add(event)
            is_first = False
        sums.add_event(event, name)
    counts.logs += 1


@contextlib.contextmanager
def _open_log(name: str) -> Iterator[BinaryIO]:
    # The admin chose this file, so links and pipes are followed, unlike in the node's own log.
    if name == STDIN:
        yield sys.stdin.buffer
        return
    try:
        log = Path(name).open("rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        hint = "name existing event logs, or none to read this node's"
        raise NotFoundError(f"{name} does not exist", hint) from None
    with log:
        yield log
