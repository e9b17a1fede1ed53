"""What happened lately on this node: who was called, how jobs began, the last failure.

A Prolog and an Epilog each leave a mark below /run when Slurm calls them, whatever the job asks for
(hooks/boundary.py): jobs that ask for nothing leave no event. How jobs began is counted from the
end of the event log, as the report counts it.
"""

import contextlib
import os
import re
from pathlib import Path

import msgspec

from forestage import events
from forestage.commands.event_counters import EventTally
from forestage.events import CopyOutcome
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import files, processes
from forestage.units import is_number

MAX_LOG_BYTES = 4 * 1024 * 1024  # bytes at the end of the event log: some 10 000 starts
MAX_EVENT_AGE = 7 * 86400.0  # seconds
SETTLE_SECONDS = 30.0  # seconds after which a process of Slurm has loaded its plugins
START_SLACK = 1.0  # seconds; slurmd may load them just before it becomes a daemon
# A job's extern step has nothing to show anybody.
_STEP = re.compile(rb"slurmstepd: \[(\d+\.(?:\d{1,9}|batch|interactive))\]")


class HookCall(msgspec.Struct, frozen=True):
    """When Slurm called a hook last, in seconds since the epoch; `job`: the latest of its jobs."""

    time: float
    job: int = 0


class RecentCalls(msgspec.Struct, frozen=True):
    """Who was called since the node booted; `companion`: a step or slurmd loaded it.

    `missed` are jobs with a step on this node for which no Prolog of forestage ran: they are later
    than the latest for which one ran, and none of their steps is from before the numbers were lower
    again. `without`: which running process of Slurm has not loaded the companion, as what loads it
    says so at its start.
    """

    prolog: HookCall | None = None
    epilog: HookCall | None = None
    companion: HookCall | None = None
    missed: tuple[int, ...] = ()
    without: str = ""


class LastFailure(msgspec.Struct, frozen=True):
    """The last outcome for which the node or forestage is at fault."""

    time: float
    job: int
    reason: str
    detail: str = ""


class RecentStarts(msgspec.Struct, frozen=True):
    """Starts for which staging was tried, from `since` to `time`, in seconds since the epoch.

    `copy_failure` is that of the last copy; None where it succeeded.
    """

    since: float = 0.0
    tried: int = 0
    hits: int = 0
    hit_ratio: float | None = None
    failure: LastFailure | None = None
    copy_failure: LastFailure | None = None
    time: float = 0.0


def read_recent_calls(places: NodePaths, now: float) -> RecentCalls:
    """Reads the marks, and which jobs have steps here. Slurm is not asked."""
    prolog = _find_call(places.hook_call_mark("prolog"))
    proc = places.root / "proc"
    latest, since = _read_mark(places.hook_call_mark("prolog"))
    later = {
        pid: job
        for pid, job in SlurmClient("", proc=proc).list_step_managers().items()
        if job > latest
    }
    before = {job for pid, job in later.items() if _began_before(proc, pid, since, now)}
    loaded = _find_call(places.loaded)
    return RecentCalls(
        prolog,
        _find_call(places.hook_call_mark("epilog")),
        loaded,
        tuple(sorted({*later.values()} - before)),
        _find_process_without_companion(proc, loaded.time if loaded else 0.0, now),
    )


def _find_call(mark: Path) -> HookCall | None:
    try:
        return HookCall(mark.stat().st_mtime, _read_mark(mark)[0])
    except FileNotFoundError:
        return None


def _read_mark(mark: Path) -> tuple[int, float]:
    """The latest job in a mark, and since when numbers are lower again; 0: they never were.

    The latter in seconds since the epoch.
    """
    text = ""
    with contextlib.suppress(OSError):
        text = files.read_file(mark)[:40].decode(errors="replace").strip()
    job, _, since = text.partition(" ")
    since = since.strip()
    return int(job) if is_number(job) else 0, float(since) if is_number(since) else 0.0


def _began_before(proc: Path, pid: int, since: float, now: float) -> bool:
    """Whether a step manager began before the numbers were lower, or has just ended."""
    if not since:
        return False
    began = _find_process_start(proc, proc / str(pid), now)
    return began is None or began < since


def count_recent_starts(file: Path, now: float) -> RecentStarts:
    """Counts the end of the event log, of the last week at most."""
    tally = EventTally()
    since, failure, copy_failure = 0.0, None, None
    for event in events.read_latest_events(file, MAX_LOG_BYTES):
        if not now - MAX_EVENT_AGE <= event.time:
            continue
        since = since or event.time
        tally.add_event(event)
        outcome = event.outcome
        failed = LastFailure(event.time, event.job, outcome.reason, outcome.detail)
        if outcome.result in ("failed", "bad"):
            failure = failed
        if isinstance(outcome, CopyOutcome) and outcome.result != "declined":
            copy_failure = failed if outcome.result == "failed" else None
    hits = tally.starts.get("hit", 0)
    return RecentStarts(
        since, tally.tried_starts, hits, tally.hit_ratio, failure, copy_failure, now
    )


def _find_process_without_companion(proc: Path, loaded: float, now: float) -> str:
    """Return which process of Slurm began after the companion was `loaded` last: without it.

    "" where none did. The companion is built for another release, or its line is gone from
    plugstack.conf. Times are wall clock, in seconds: a clock that is set after slurmd's start may
    accuse it until the next step. What began just now may be about to load it.
    """
    for process, title in processes.list_root_processes(proc):
        began = _find_process_start(proc, process, now)
        if began is None or now - began < SETTLE_SECONDS or began <= loaded + START_SLACK:
            continue
        if step := _STEP.match(title):
            return f"step {step[1].decode()} runs without forestage's SPANK plugin"
        if title.partition(b"\0")[0].rpartition(b"/")[2] == b"slurmd":
            return "slurmd has not loaded forestage's SPANK plugin"
    return ""


def _find_process_start(proc: Path, process: Path, now: float) -> float | None:
    """When a process began, by the time since boot that it has in /proc; None if it has ended."""
    try:
        ticks = processes.read_stat(process).began
        up = float((proc / "uptime").read_bytes().split()[0])
    except OSError:
        return None
    return now - up + ticks / os.sysconf("SC_CLK_TCK")
