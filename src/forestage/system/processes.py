"""What /proc says of processes. A name is what its user likes: any bytes, a bracket among them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# proc(5): the real one is the first. No name forges this line: its newline is escaped in there.
_REAL = re.compile(rb"^Uid:\t(\d+)\t", re.MULTILINE)


class ProcessStat(NamedTuple):
    """Of proc_pid_stat(5): its state, its parent, its session, and when it began.

    `began` is in ticks since the boot. In state Z or X it only waits to be reaped.
    """

    state: str
    parent: int
    session: int
    began: int

    @property
    def is_over(self) -> bool:
        """Whether it only waits to be reaped."""
        return self.state in ("Z", "X")


class ProcessIdentity(NamedTuple):
    """A process, which no later one of its number is taken for; `began` as in ProcessStat."""

    pid: int
    began: int

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; one that only waits to be reaped has."""
        try:
            found = read_stat(PROC / str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return False
        return found.began == self.began and not found.is_over


def find_identity(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process of this number, or None if /proc has none."""
    try:
        return ProcessIdentity(pid, read_stat(PROC / str(pid)).began)
    except (FileNotFoundError, ProcessLookupError):
        return None


def list_pids() -> Iterator[int]:
    """The processes of the node."""
    return map(int, filter(str.isdigit, os.listdir(PROC)))  # noqa: PTH208 - names, and many


def read_stat(process: Path) -> ProcessStat:
    """What `process`, a directory of /proc, is now. Raises OSError; for one that has ended, too."""
    # After the last ")": that ends its name.
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def read_name(process: Path) -> str:
    """What ps(1) calls it. Raises OSError; for one that has ended, too."""
    return os.fsdecode((process / "comm").read_bytes().removesuffix(b"\n"))


def is_trusted(process: Path) -> bool:
    """Return whether a process is root's, or of the user who asks, by its real id.

    Any user's process has what name and environment that user likes, with an effective id of
    root's too: su(1) by a link of another name waits for a password for as long as they like.
    """
    try:
        return _read_real_uid(process) in (0, os.getuid())
    except OSError:  # it has just ended
        return False


def _read_real_uid(process: Path) -> int:
    """Return the real uid of a process. Raises OSError."""
    found = _REAL.search((process / "status").read_bytes())
    return int(found[1]) if found else -1


def list_root_processes(proc: Path = PROC) -> Iterator[tuple[Path, bytes]]:
    """Root's processes, each with its title: any user's may call itself what it likes.

    By the real id: to a program with a set-id bit, such as su(1), its user gives any title. It is
    asked for first, as a title lies in its process's own memory, where one may wait for a user.
    """
    for process in proc.glob("[0-9]*"):
        try:
            if _read_real_uid(process) == 0:
                yield process, (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has just ended
            continue
