"""How these tests make things go wrong: in the stager's own process, and beside it."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from forestage.cache.part import PROCESS_NAME, list_missing_chunks
from forestage.clock import Clock
from node import Node, content, until
from through import SIZE

MIB = 1024 * 1024
CHUNKS = 6
GOINGDOWN = 0x8004587D  # linux/ext4.h, EXT4_IOC_SHUTDOWN; xfs has the same
NOLOGFLUSH = (2).to_bytes(4, "little")

Result = TypeVar("Result")

_fork = multiprocessing.get_context("fork")


@lru_cache(maxsize=3)  # what is kept costs at each fork
def image(seed: int = 1, size: int = CHUNKS * MIB - 4321) -> bytes:
    """Bytes that no other seed gives; the last chunk is short, and ends within a block."""
    return content(seed, size)


def source_bytes(seed: int = 7) -> bytes:
    """Those of the source that a read-through file shows (through.py)."""
    return image(seed, SIZE)


def in_stager() -> bool:
    """Not in a hook, nor in a child that looks on behalf of one or the other."""
    named = Path("/proc/self/comm").read_text().strip() == PROCESS_NAME
    return named and os.getsid(0) == os.getpid()


def kill_stager() -> None:
    """For a trace point: kill -9 of the process that passes it."""
    assert in_stager()
    os.kill(os.getpid(), signal.SIGKILL)


def shut_down(point: Path) -> None:
    """From now on nothing reaches the disk of this ext4 or xfs, not even what its log has."""
    fd = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, GOINGDOWN, NOLOGFLUSH)
    finally:
        os.close(fd)


class Points:
    """Listens at the trace points of all stagers; the n-th passing of one can make things happen.

    Stagers are forked from the test's process, so they inherit it; the test reads their file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._actions: list[tuple[str, int | None, Callable[[], None]]] = []

    def at(self, name: str, action: Callable[[], None], nth: int | None = 1) -> None:
        """Does `action` in the stager that is the n-th to pass; None means each time."""
        self._actions.append((name, nth, action))

    def calm(self) -> None:
        """From now on nothing more goes wrong."""
        self._actions.clear()

    def __call__(self, name: str) -> None:
        if not in_stager():
            return
        with self._file.open("a+") as file:  # one lock for each opening, so also between threads
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{name} {os.getpid()}\n")
            file.flush()
            file.seek(0)
            count = Counter(line.split()[0] for line in file)[name]
        for wanted, nth, action in self._actions:
            if wanted == name and nth in (None, count):
                action()

    def passed(self) -> list[tuple[str, int]]:
        """Every passing so far, in order: the point's name, the stager's pid."""
        if not self._file.exists():
            return []
        lines = [line.split() for line in self._file.read_text().splitlines()]
        return [(name, int(pid)) for name, pid in lines]

    def count(self, name: str) -> int:
        return sum(1 for passed, _ in self.passed() if passed == name)


class Gate:
    """A point of the program at which stagers wait until the test opens it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> None:
        until(self._file.exists, "the test to open a gate")

    def open(self) -> None:
        self._file.touch()


class Until(Clock):
    """The real clock until something has happened; from then on every deadline is over."""

    DAYS = 10 * 86400.0  # longer than any that slurm.conf may ask for

    def __init__(self, happened: Callable[[], object]) -> None:
        self._happened = happened

    def monotonic(self) -> float:
        return super().monotonic() + (self.DAYS if self._happened() else 0.0)


class Beside(Generic[Result]):
    """A hook that runs beside the test, in a process group of its own as under slurmd."""

    def __init__(self, run: Callable[[], Result]) -> None:
        self._answers = _fork.SimpleQueue()
        self._process = _fork.Process(target=self._live, args=(run,), daemon=True)
        self._process.start()

    def _live(self, run: Callable[[], Result]) -> None:
        os.setpgid(0, 0)
        self._answers.put(run())

    def ran(self) -> Result:
        """How it ended; one that hangs ends the test."""
        until(lambda: self._process.exitcode is not None, "a hook to end")
        assert self._process.exitcode == 0
        answer: Result = self._answers.get()
        return answer

    def kill(self) -> None:
        """As slurmd does at its timeout: SIGKILL to the group."""
        assert self._process.pid is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(60)


def beside(run: Callable[[], Result]) -> Result:
    """Runs a hook in a process of its own: one that hangs must not take the test along."""
    return Beside(run).ran()


def missing(node: Node, key: str) -> int:
    """How many chunks of a part are not in yet."""
    part = node.cache.part(key)
    owner = part.find_record()
    assert owner is not None
    return len(list_missing_chunks(part.read_digests(), owner.image.size, owner.chunk))


def served(node: Node, path: Path, data: bytes) -> bool:
    """Whether the path shows an entry that is whole, and nothing of the copy is left."""
    (key,) = [key for at, key in node.binds().items() if at == str(path)]
    return node.shows_entry(path, key) and path.read_bytes() == data and not node.parts()


def untouched(node: Node, path: Path, job: int) -> bool:
    """Whether the job sees the shared file system as if there were no forestage."""
    return node.shows_source(path) and node.binds() == {} and node.lease(job) is None
