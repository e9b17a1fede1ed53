"""What the host sees of a cluster: the processes that lead its namespaces, and loop devices."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# The shell notes its own line of /proc and then becomes the leader, keeping PID and start time.
# It must do so while it still sees the host's /proc, not the one in which it is process 1.
RECORD = 'read -r stat </proc/self/stat && echo "$stat" >"$0" && exec "$@"'


# Seconds that one look counts at the most: a machine that stood still has not waited.
LONGEST_LOOK = 10.0


class ClusterError(Exception):
    """Something that a test needs of its cluster did not happen."""


class Leader:
    """The first process of a PID namespace. When it is killed, so are all the others."""

    def __init__(self, record: Path) -> None:
        self.record = record

    def recorded(self, argv: Sequence[str]) -> list[str]:
        """The command line that becomes `argv` and is known here from then on."""
        return ["sh", "-c", RECORD, str(self.record), *argv]

    @property
    def pid(self) -> int:
        """As this PID namespace counts. Raises ClusterError if there never was such a process."""
        try:
            return _identity(self.record)[0]
        except (OSError, IndexError):
            raise ClusterError(f"not running: nothing in {self.record}") from None

    @property
    def alive(self) -> bool:
        """Whether the recorded process runs, and not a later one that was given its PID."""
        try:
            recorded = _identity(self.record)
            return recorded == _identity(Path("/proc", str(recorded[0]), "stat"))
        except (OSError, IndexError):
            return False

    def kill(self) -> None:
        """Returns when the whole namespace is dead: the kernel lets its leader go last."""
        if not self.alive:
            return
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(self.pid)
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [])  # unmounting may write much to a slow disk
            finally:
                os.close(process)


def _identity(stat: Path) -> tuple[int, str]:
    """PID and start time out of a line as in /proc/PID/stat (fields 1 and 22 of proc(5))."""
    line = stat.read_text()
    return int(line.split()[0]), line.rpartition(")")[2].split()[19]


def file_identity(file: Path) -> str:
    """Inode and device. Not the name: the kernel shows the one that the cluster has for it."""
    stat = file.stat()
    return f"{stat.st_ino} {os.major(stat.st_dev)}:{os.minor(stat.st_dev)}"


def loop_files() -> set[str]:
    """The identities of all files that are open as loop devices."""
    command = ["losetup", "--list", "--noheadings", "-O", "BACK-INO,BACK-MAJ:MIN"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {" ".join(line.split()) for line in listing.splitlines()}


def detach_above(files: set[str]) -> None:
    """Detaches the loop devices of what lies in the file systems of these files' loop devices."""
    columns = "NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-INO"
    command = ["losetup", "--list", "--noheadings", "-O", columns]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # A device that another process detaches meanwhile has no file any more.
    loops = [row for line in listing.splitlines() if len(row := line.split()) == 4]
    below = {number for _, number, disk, inode in loops if f"{inode} {disk}" in files}
    for name, _, disk, _ in loops:
        if disk in below:
            subprocess.run(["losetup", "--detach", name], check=False)


def wait_until(
    done: Callable[[], bool], seconds: float, problem: Callable[[], str], every: float = 0.05
) -> None:
    """Polls, each `every` seconds, and less often in a long wait: each look costs the processors.

    Raises ClusterError with the problem when the time is over.
    """
    left = seconds
    start = last = time.monotonic()
    while not done():
        if left < 0:
            raise ClusterError(f"after {seconds:g} s: {problem()}")
        time.sleep(max(every, min((last - start) / 8, 0.4)))
        now = time.monotonic()
        left, last = left - min(now - last, LONGEST_LOOK), now


def exit_on_sigterm() -> None:
    """Makes SIGTERM end this program as ^C does, so that `with` takes its clusters down."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
