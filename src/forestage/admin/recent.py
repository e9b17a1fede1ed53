"""What happened lately on this node: who was called, how jobs began, the last failure.

A Prolog and an Epilog each leave a mark below /run when Slurm calls them, whatever the job asks for
(hooks/boundary.py): jobs that ask for nothing leave no event. How jobs began is counted from the
end of the event log, as the report counts it.
"""

from pathlib import Path

import msgspec

from forestage import events
from forestage.admin.tally import Tally
from forestage.paths import Places
from forestage.slurm.queue import Slurm

LOOK = 4 * 1024 * 1024  # bytes at the end of the event log: some 10 000 starts
AGE = 7 * 86400.0  # seconds


class Call(msgspec.Struct, frozen=True):
    """When Slurm called a hook last, in seconds since the epoch; `job`: the latest of its jobs."""

    time: float
    job: int = 0


class Calls(msgspec.Struct, frozen=True):
    """Who was called since the node booted; `companion`: a step or slurmd loaded it.

    `missed` are jobs with a step on this node for which no Prolog of forestage ran: they are later
    than the latest for which one ran.
    """

    prolog: Call | None = None
    epilog: Call | None = None
    companion: Call | None = None
    missed: tuple[int, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """The last outcome for which the node or forestage is at fault."""

    time: float
    job: int
    reason: str
    detail: str = ""


class Starts(msgspec.Struct, frozen=True):
    """Starts for which staging was tried, `since` a time in seconds since the epoch."""

    since: float = 0.0
    tried: int = 0
    hits: int = 0
    hit_ratio: float | None = None
    failure: Failure | None = None


def calls(places: Places) -> Calls:
    """Reads the marks, and which jobs have steps here. Slurm is not asked."""
    prolog = _call(places.called("prolog"))
    at_work = Slurm("", proc=places.root / "proc").at_work()
    latest = prolog.job if prolog else 0
    return Calls(
        prolog,
        _call(places.called("epilog")),
        _call(places.loaded),
        tuple(sorted(job for job in at_work if job > latest)),
    )


def _call(mark: Path) -> Call | None:
    try:
        when, text = mark.stat().st_mtime, mark.read_bytes()[:20].decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    return Call(when, int(text) if text.isascii() and text.isdigit() else 0)


def starts(file: Path, now: float) -> Starts:
    """Counts the end of the event log, of the last week at most."""
    tally = Tally()
    since, failure = 0.0, None
    for event in events.latest(file, LOOK):
        if not now - AGE <= event.time:
            continue
        since = since or event.time
        tally.add(event)
        outcome = event.outcome
        if outcome.result in ("failed", "bad"):
            failure = Failure(event.time, event.job, outcome.reason, outcome.detail)
    return Starts(since, tally.tried, tally.starts.get("hit", 0), tally.hit_ratio, failure)
