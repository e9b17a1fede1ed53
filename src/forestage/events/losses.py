"""What the event log could not take: a note in /run, by which `explain` knows that events are lost.

An event is no reason to fail a job, so a full disk of /var/log costs its events and nothing else.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forestage.events.event_log import EventRecord, ReleaseOutcome
from forestage.system import records
from forestage.units import make_printable


class LostEvents(msgspec.Struct, frozen=True):
    """Since when and until when events were lost, in seconds since the epoch, and the last error.

    In between the log may have taken others.
    """

    since: float
    until: float
    why: str


def record_loss(file: Path, now: float, error: OSError) -> None:
    """Note that an event could not be recorded at `now`, beside the losses noted before."""
    with contextlib.suppress(OSError):  # /run may be full as well
        before = records.find(file, LostEvents)
        since = min(before.since, now) if before else now
        lost = LostEvents(round(since, 3), round(now, 3), make_printable(str(error)))
        records.write(file, msgspec.json.encode(lost))


def find_loss(file: Path) -> LostEvents | None:
    """Return which events were lost since the node booted; None if there are none."""
    try:
        return records.find(file, LostEvents)
    except OSError:
        return None


def may_lack_events(lost: LostEvents, job_events: Sequence[EventRecord]) -> bool:
    """Return whether a job that has these events may lack others. Pure."""
    if not job_events:
        return True
    last = job_events[-1]
    is_over = last.hook == "epilog" and isinstance(last.outcome, ReleaseOutcome)
    # An event has the time at which its hook ended. Without a Prolog's, that may be what is lost.
    prologs = [event.time - event.total for event in job_events if event.hook == "prolog"]
    begin = min(prologs, default=0.0)
    return lost.until >= begin and not (is_over and lost.since > last.time)
