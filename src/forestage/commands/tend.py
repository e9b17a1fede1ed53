"""The minute's work: `forestage tend`, which forestage.timer starts each minute.

Each part is a command of forestage's in a process of its own, which holds the part's lock for as
long as it lives. So no part waits for another that hangs with a disk, a source or Slurm: a process
is killed at the part's limit. If the kernel cannot end it, it keeps the lock, and later runs leave
the part out until it is gone.

    room        first, since jobs may be waiting for it, with the I/O of any program
    …           those that features have, by their tend.py: first those that the run waits for
    sweep       every tenth run, and may outlive this one
    proofs      the same: reads the entries that are due
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import click
import msgspec

from forestage.cache import disk_errors
from forestage.clock import Clock, Deadline
from forestage.commands.command_context import ExitStatus, raise_signals_as_interrupt
from forestage.errors import ConfigError, ForestageError
from forestage.features.contexts import TendFacts
from forestage.features.doors import TEND_EACH_MINUTE, TEND_WORKS_FOR_OTHERS, load_doors
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import folders, forked_child, lock, run
from forestage.system.run import RunningProcess
from forestage.units import make_printable

RUN_SECONDS = 48.0  # seconds: the next run begins a minute after this one did
KILL_TIMEOUT = (
    1.0  # seconds for a killed process to be gone; one that hangs in the kernel is left behind
)
SWEEP_INTERVAL = (
    590.0  # seconds between two sweeps: the tenth run begins ten minutes later, or a bit more
)
IDLE_COMMAND = ("ionice", "-c", "3", "nice", "-n", "19")  # ionice is of util-linux, as setpriv is
OOM_SCORE_ADJ = 500  # as in forestage.service: the kernel ends it before jobs
UNMOUNTED_STATUS = (
    12  # how a command ends that has no cache here yet (commands/command_context.ExitStatus)
)

PartState = Literal["ended", "begun", "cut", "hangs", "left out", "failed"]


class TendPart(msgspec.Struct, frozen=True):
    """One part: its command, and for how many seconds the run waits for it.

    With a limit of 0 the run does not wait, and the part may outlive it. `every` are the seconds
    between two beginnings. `is_idle` leaves CPU and I/O to others first. `done` is a file that is
    made once the part has succeeded. `harmless` are the exit statuses that are no failure.
    """

    name: str
    command: tuple[str, ...]
    limit: float = 0.0
    every: float = 0.0
    is_idle: bool = False
    done: Path | None = None
    harmless: tuple[int, ...] = (0, UNMOUNTED_STATUS)


class TendPartEnd(msgspec.Struct, frozen=True):
    """What became of a part: `begun` outlives the run, `left out` still has an earlier process.

    `code` is the exit status of one that `ended`, `harmless` as the part has it.
    """

    name: str
    state: PartState
    code: int = 0
    detail: str = ""
    harmless: tuple[int, ...] = (0, UNMOUNTED_STATUS)

    @property
    def has_failed(self) -> bool:
        """Whether the run has failed with it."""
        return self.state in ("cut", "hangs", "failed") or self.code not in self.harmless


StartPart = Callable[[TendPart, int | None], RunningProcess]
"""Starts a part, whose process inherits this descriptor of its lock, if there is one."""


def list_parts(facts: TendFacts, is_doubted: bool) -> Iterator[TendPart]:
    """Yield the parts of a run, in their order; those without an object here are none of it.

    `is_doubted`: no job is served until the entries are read, so they are read at once.
    """
    of_node = facts.config is not None and not facts.is_feature_host
    if of_node:
        yield TendPart("room", ("evict", "--quiet"), 20.0)
    added: list[TendPart] = []
    for each_minute in load_doors(TEND_EACH_MINUTE):
        added += each_minute(facts)
    yield from sorted(added, key=lambda part: not part.limit)
    if of_node:
        yield TendPart(
            "sweep", ("sweep", "--quiet", "--only", "leftovers"), every=SWEEP_INTERVAL, is_idle=True
        )
        every = 0.0 if is_doubted else SWEEP_INTERVAL
        yield TendPart(
            "proofs", ("sweep", "--quiet", "--only", "entries"), every=every, is_idle=True
        )


def part_lock_path(places: NodePaths, name: str) -> Path:
    """Return the lock that the process of the part of this name holds. Pure."""
    return places.locks / f"tend-{name}.lock"


def run_due_parts(
    places: NodePaths, clock: Clock, parts: Iterator[TendPart], start: StartPart
) -> Iterator[TendPartEnd]:
    """Run the parts that are due, and tell what became of each."""
    end = Deadline.after(RUN_SECONDS, clock)
    with contextlib.suppress(OSError):  # the parts that need a lock tell why there is none
        folders.ensure_directory(places.run, folders.PASSABLE)
        folders.ensure_directory_with_mode(places.locks)
    for part in parts:
        file = part_lock_path(places, part.name)
        try:
            if not _is_due(file, part.every, clock) or (part.limit and not end.seconds_left()):
                continue
            process = _start_if_unlocked(part, file, clock.wall(), start)
        except (ForestageError, OSError) as error:  # the other parts need not fail for that
            yield TendPartEnd(part.name, "failed", detail=make_printable(str(error)))
            continue
        if process is None:
            yield TendPartEnd(part.name, "left out")
        elif not part.limit:
            yield TendPartEnd(part.name, "begun")
        else:
            yield _wait_for_part(part, process, min(part.limit, end.seconds_left()))


def _is_due(file: Path, every: float, clock: Clock) -> bool:
    """Whether a part began so long ago, or at a time that this clock has yet to reach."""
    if not every:
        return True
    try:
        began = file.stat().st_mtime
    except FileNotFoundError:
        return True
    return not 0 <= clock.wall() - began < every


def _start_if_unlocked(
    part: TendPart, file: Path, now: float, start: StartPart
) -> RunningProcess | None:
    """Start a part, or return None if its last process still lives.

    Where no lock can be made (/run is full or read-only), a part with a limit goes without: jobs
    may be waiting for the room.
    """
    try:
        held = lock.acquire_now(file)
    except OSError:
        if not part.limit:
            raise
        return start(part, None)
    if held is None:
        return None
    try:
        os.utime(held, (now, now))
        return start(part, held)
    finally:
        os.close(held)  # the process has a copy, and with it the lock


def _wait_for_part(part: TendPart, process: RunningProcess, limit: float) -> TendPartEnd:
    try:
        if process.wait(limit):
            code = process.exit_code or 0
            if part.done is not None and code == 0:
                with contextlib.suppress(OSError):  # /run is full: the next run finds it done again
                    part.done.touch()
            return TendPartEnd(part.name, "ended", code, harmless=part.harmless)
    finally:
        if process.exit_code is None:  # also where this run is to end
            process.kill()
    gone = process.wait(KILL_TIMEOUT)
    return TendPartEnd(part.name, "cut" if gone else "hangs", detail=f"process {process.pid}")


def start_part(environ: Mapping[str, str], part: TendPart, held: int | None) -> RunningProcess:
    """Start a part by the program that this process is. Raises Failed, OSError.

    What may outlive the run leaves the unit's cgroup, as systemd complains of what is left there.
    The others end with this process: nobody would end them at their limit if it was killed.
    """
    program = (*(IDLE_COMMAND if part.is_idle else ()), str(Path(sys.argv[0]).absolute()))
    words = (*(run.DIES_WITH_US if part.limit else ()), *program, *part.command)
    leave = (
        run.stay_in_cgroups
        if part.limit
        else partial(forked_child.leave_job_cgroups, OOM_SCORE_ADJ, "idle")
    )
    return run.start_command(words, environ, () if held is None else (held,), leave)


def format_part_end(end: TendPartEnd) -> str:
    """What the log says of a part, "" for nothing: its command has written what it did. Pure."""
    return {
        "ended": "",
        "begun": "",
        "cut": f"{end.name}: ended after its time was over ({end.detail})",
        "hangs": f"{end.name}: hangs in the kernel and is left out until it ends ({end.detail})",
        "left out": f"{end.name}: left out, its last process still runs",
        "failed": f"{end.name}: could not be started: {end.detail}",
    }[end.state]


@click.command("tend")
@click.pass_context
def tend_command(ctx: click.Context) -> None:
    """Do the minute's work: room, metrics, prefetch, the sweep, proofs of entries.

    Run by forestage.timer. Each part is a command in a process of its own; one that hangs is left
    out until it ends, and holds up no other. Ends within 50 s; sweep and proofs may go on.
    """
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "the cache is root's")
    places, clock = ctx.obj
    config, wrong = None, None
    try:
        config = ctx.obj.load_config().node_config
    except ConfigError as error:
        wrong = error
    is_apart = config is not None and any(
        works_for_others(config, SlurmClient.from_environ(os.environ))
        for works_for_others in load_doors(TEND_WORKS_FOR_OTHERS)
    )
    is_apart = is_apart and not places.hook_call_mark("prolog").exists()
    is_doubted = bool(disk_errors.read_state(places).since)
    parts = list_parts(TendFacts(places, clock, config, is_apart), is_doubted)
    has_failed = is_told = False
    with raise_signals_as_interrupt():
        for end in run_due_parts(places, clock, parts, partial(start_part, os.environ)):
            has_failed |= end.has_failed
            is_told |= end.code == ExitStatus.CONFIG  # by the part itself
            if text := format_part_end(end):
                click.echo(text)
    if wrong and not is_told:
        raise wrong
    if wrong:
        ctx.exit(ExitStatus.CONFIG)
    if has_failed:
        ctx.exit(ExitStatus.FAILED)


COMMANDS = (tend_command,)
