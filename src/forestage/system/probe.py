"""Whether a file system answers, asked by one process of the node at a time.

    FILE    "PHASE SECONDS PID": what its holder waits for and since when, or when the last one got
            its answer (monotonic clock); locked (flock(2)) by the process that asks

Who asks one that hangs cannot be killed, and must not be many. So a process of its own asks, which
is left behind where it hangs, and the lock that it holds is the memory:

    the lock is free, the answer is GOOD       nobody is asked
    the lock is free                           a process is forked that takes it, asks, and ends
    it is held, for less than a moment         whoever comes waits for the rest of that moment
    it is held for longer                      the file system hangs, known at once
    the process got its answer                 the lock goes with it: asked again, good again

A time stamp in its place would be wrong at both ends: a disk that stopped for a second would count
as hung for minutes, and one that hangs on would cost a process each time.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from forestage import log
from forestage.system import folders, forked_child, processes
from forestage.system.files import open_descriptor

GOOD = 1.0  # seconds that an answer counts
LIMIT = 1.0  # seconds; a healthy disk or server needs milliseconds
POLL = 0.005  # seconds between two looks at a process that another has started
ANSWERED = "answered"
FORKED = "forked"  # nothing was asked yet
PROCESS_NAME = "forestage-probe"

ReportPhase = Callable[[str], None]
"""Says what is asked now, in one word."""


class HangReport(msgspec.Struct, frozen=True):
    """What gets no answer, for how many seconds by now, and the process that has asked."""

    phase: str
    seconds: float
    pid: int = 0


def find_hang(
    file: Path, work: Callable[[ReportPhase], None], limit: float = LIMIT
) -> HangReport | None:
    """None where what `work` asks is answered, or was within GOOD; else what hangs.

    `work` does what may hang, and says before each part what that is; an OSError is an answer.
    Takes `limit` seconds at most. None also where nobody can be asked.
    """
    limit = min(limit, LIMIT)
    try:
        folders.ensure_directory(file.parent, folders.PRIVATE)
        with open_descriptor(
            file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
        ) as fd:
            return _probe_or_wait(fd, work, limit)
    except OSError:  # /run is full or read-only, or this is no root
        return None


def start_probe(file: Path, work: Callable[[ReportPhase], None]) -> None:
    """Has a process ask, for those who come later; does not wait."""
    find_hang(file, work, 0.0)


def find_known_hang(file: Path) -> HangReport | None:
    """What hangs by what is known already; asks nobody, but waits for who asks just now."""
    with contextlib.suppress(OSError), open_descriptor(file, os.O_RDONLY | os.O_NOFOLLOW) as fd:
        return _wait_for_other_probe(fd, time.monotonic() + LIMIT)
    return None


def _probe_or_wait(fd: int, work: Callable[[ReportPhase], None], limit: float) -> HangReport | None:
    start = time.monotonic()
    said = _read_record(fd)
    if said.phase == ANSWERED and said.seconds < GOOD:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _wait_for_other_probe(fd, start + limit)
    _write_record(fd, FORKED)
    pid, ours = forked_child.fork_with_socket(partial(_run_probe, fd, work), _log_failure)
    with ours:
        ours.settimeout(max(limit, 0.001))
        try:
            ours.recv(1)  # it says nothing, and ends
        except TimeoutError:
            return _find_recorded_hang(fd)
    with contextlib.suppress(ChildProcessError):  # somebody has collected it
        os.waitpid(pid, 0)
    return None


def _wait_for_other_probe(fd: int, until: float) -> HangReport | None:
    """Waits for the process that another has started."""
    while not _is_unlocked(fd):
        if time.monotonic() >= until or (
            _read_record(fd).seconds >= LIMIT and _find_recorded_hang(fd)
        ):
            return _find_recorded_hang(fd)
        time.sleep(POLL)
    return None


def _find_recorded_hang(fd: int) -> HangReport | None:
    """What hangs by what is written there; None where the process only waits for a processor."""
    hang = _read_record(fd)
    return None if hang.phase in (ANSWERED, FORKED) or _is_runnable(hang.pid) else hang


def _is_runnable(pid: int) -> bool:
    """Whether a process could go on, and only waits for its turn on a busy node."""
    try:
        return processes.read_stat(Path(f"/proc/{pid}")).state == "R"
    except OSError:  # it has just ended
        return True


def _is_unlocked(fd: int) -> bool:
    """Whether nobody asks now; takes the lock for an instant, in which another may miss it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _read_record(fd: int) -> HangReport:
    """What was written last, and how long ago; as long ago as can be where nothing was."""
    with contextlib.suppress(ValueError):
        phase, at, pid = os.pread(fd, 64, 0).decode(errors="replace").split()
        ago = time.monotonic() - float(at)
        if ago >= 0:  # else it is not of this boot
            return HangReport(phase, ago, int(pid))
    return HangReport(ANSWERED, float("inf"))


def _write_record(fd: int, phase: str) -> None:
    os.pwrite(fd, f"{phase} {time.monotonic():f} {os.getpid()}".ljust(64).encode(), 0)


def _run_probe(fd: int, work: Callable[[ReportPhase], None], starter: socket.socket) -> None:
    """The whole life of the process that asks. It holds the lock, in a copy of the descriptor."""
    forked_child.close_descriptors_except({fd, starter.fileno()})
    # Neither a hook's group nor a job's cgroup waits for it, or kills who remembers.
    forked_child.leave_job_cgroups()
    forked_child.detach_session(PROCESS_NAME)
    with contextlib.suppress(OSError):
        work(partial(_write_record, fd))
    _write_record(fd, ANSWERED)


def _log_failure(starter: socket.socket, error: BaseException | None) -> None:
    log.write_log_line(f"probe result=failed detail={error!r}", by_slurm=True)
