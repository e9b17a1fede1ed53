"""Hooks in processes of their own, to which something happens in the middle of their work.

Everything that forestage does to the node passes one of Python's audit events, a mount call or a
trace point. These are counted, so that a process can be killed, stopped or given an error at its
n-th effect, whichever line of the program that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from played import Ended

from forestage import trace
from forestage.cache.layout import Cache
from forestage.stage import stager
from forestage.system import as_user, lock, mounts
from node import until

Role = Literal["hook", "stager", "look"]

NODE = "/mnt/"  # where the test's node lies
PATIENCE = 60_000  # looks, a millisecond or more apart; a hook that needs more of them hangs
EFFECTS = {
    "open",
    "os.chmod",
    "os.chown",
    "os.fork",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.setxattr",
    "os.truncate",
    "os.utime",
    "fcntl.flock",
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group() -> None:
    """As slurmd does at its timeout, and the companion at its."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Doom:
    """What happens to the first process in this role at its `nth` effect."""

    role: Role
    nth: int
    deed: Callable[[], None]


class _Watch:
    """In the hook's process and in those it forks: counts, and does the deed once in all."""

    def __init__(self, doom: Doom, once: Path) -> None:
        self.doom = doom
        self.once = once
        self.role: Role = "hook"
        self.count = 0

    def install(self) -> None:
        sys.addaudithook(self._audited)
        trace.listener = lambda name: self.passes()
        for name in ("mount", "umount"):
            setattr(mounts, name, self._counted(getattr(mounts, name)))
        stager._run_stager = self._as("stager", stager._run_stager)
        as_user._run_child = self._as("look", as_user._run_child)

    def passes(self) -> None:
        if self.role != self.doom.role:
            return
        self.count += 1
        if self.count == self.doom.nth and self._first():
            self.doom.deed()

    def _first(self) -> bool:
        try:
            os.mkdir(self.once)
        except FileExistsError:
            return False
        return True

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        elsewhere = event == "open" and not str(arguments[0]).startswith(NODE)
        # Letting go never fails; if it did, the process would wait for itself, for a minute.
        lets_go = event == "fcntl.flock" and arguments[1] == fcntl.LOCK_UN
        if event in EFFECTS and not (elsewhere or lets_go):
            self.passes()

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any) -> None:
            self.passes()
            call(*arguments)
            self.passes()

        return counted

    def _as(self, role: Role, live: Callable[..., Any]) -> Callable[..., Any]:
        def living(*arguments: Any) -> Any:
            self.role, self.count = role, 0
            return live(*arguments)

        return living


class Beside:
    """One hook in a process, and a process group, of its own."""

    def __init__(self, folder: Path, work: Callable[[], Ended], doom: Doom | None) -> None:
        self._answer = folder / f"answer-{time.monotonic_ns()}"
        self.pid = os.fork()
        if self.pid == 0:
            self._live(work, doom)

    def _live(self, work: Callable[[], Ended], doom: Doom | None) -> None:
        try:
            os.setpgid(0, 0)
            if doom is not None:
                _Watch(doom, self._answer.with_suffix(".done")).install()
            ended = work()
            self._answer.write_bytes(pickle.dumps(ended))
        finally:
            os._exit(0)

    def ended(self) -> Ended | None:
        """How it ended; None if it has stopped itself."""
        for _ in range(PATIENCE):
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return None
            if pid:
                return self._collected(status)
            time.sleep(0.001)
        raise AssertionError("a hook hangs")

    def _collected(self, status: int) -> Ended:
        with contextlib.suppress(FileNotFoundError):
            self._answer.with_suffix(".done").rmdir()
        if os.WIFSIGNALED(status):
            return Ended(killed=True)
        answer = self._answer.read_bytes()
        self._answer.unlink()
        ended: Ended = pickle.loads(answer)
        return ended

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


class Stagers:
    """The stagers that have outlived their hooks; they have become the test's children.

    `others` gives those children that are none.
    """

    def __init__(self, cache: Cache, others: Callable[[], set[int]]) -> None:
        self.cache = cache
        self.others = others
        self.stopped: set[int] = set()

    def settle(self) -> None:
        """Waits until each has ended or stopped itself."""
        until(self._quiet, "the stagers to end")

    def _quiet(self) -> bool:
        self._collect()
        # Locks show the stagers of a hook that is stopped; others may not have theirs yet.
        return self._at_work() <= len(self.stopped) and self._children() <= self.stopped

    def _children(self) -> set[int]:
        me = os.getpid()
        listed = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        return set(map(int, listed)) - self.others()

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not pid:
                    return
                if os.WIFSTOPPED(status):
                    self.stopped.add(pid)
                elif not os.WIFCONTINUED(status):
                    self.stopped.discard(pid)

    def _at_work(self) -> int:
        locks = self.cache.locks.glob("*.lock")
        return sum(not lock.is_free(one) for one in locks if one != self.cache.space_lock)

    def go_on(self) -> None:
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        self.settle()

    def kill(self) -> None:
        for pid in self.stopped:
            os.kill(pid, signal.SIGKILL)
        until(self._all_dead, "killed stagers to end")

    def _all_dead(self) -> bool:
        self._collect()
        return not self.stopped
