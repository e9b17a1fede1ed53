"""A shared file system of our own that can be slow, odd, stop answering, and die; see farfs.c."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Protocol

from forestage.system import mounts
from forestage.system.as_user import User
from node import ALICE, children_left, unmount, until

ROOT = User("root", 0, 0)
OPTIONS = "allow_other,default_permissions"


class Sides(Protocol):
    """Where a shared file system lies for its server, and for a node."""

    @property
    def server(self) -> Path: ...
    @property
    def shared(self) -> Path: ...


class Far:
    """Lies in the node's `sources` beside the healthy one. In a private mount namespace only.

    A user other than root mounts it with a program of their own.
    """

    def __init__(
        self,
        program: Path,
        node: Sides,
        control: Path,
        name: str = "far",
        user: User = ROOT,
        options: str = OPTIONS,
        shows: Path | None = None,
    ) -> None:
        """`shows` is the folder of another one, as another node has it."""
        self.folder = shows or node.server / f".{name}"
        self.point = node.shared / name
        for made in [self.point] if shows else [self.folder, self.point]:
            made.mkdir()
            os.chown(made, user.uid, user.gid)
        self._control = control
        self._calls = control.with_name(f"{control.name}.calls")
        for file in (self._control, self._calls):
            file.touch(mode=0o666)
            file.chmod(0o666)
        argv: list[str | Path] = [program, self.folder, control, self.point, options]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, user=user.uid, group=user.gid, extra_groups=[]
        )
        # Not ismount(): root need not be let in.
        until(
            lambda: str(self.point) in {one.point for one in mounts.list_mounts()}, "farfs to mount"
        )

    def put(self, name: str, data: bytes) -> Path:
        """Puts a file there; gives its path on the node."""
        file = self.folder / name
        file.write_bytes(data)
        os.chown(file, ALICE.uid, ALICE.gid)
        return self.point / name

    def behaves(self, **words: int) -> None:
        """How it behaves from now on, in the words of farfs.c; what is not named is as usual."""
        # Written beside and renamed: a reader must not find it empty.
        new = self._control.with_suffix(".new")
        new.write_text("".join(f"{word} {number}\n" for word, number in words.items()))
        new.replace(self._control)

    def hang_reads(self) -> None:
        """The data servers are gone and the metadata server is not."""
        self.behaves(reads=-1)

    def calls(self) -> Counter[str]:
        """How often it was called so far, by the name of the call."""
        return Counter(self._calls.read_text().split())

    def is_left_alone(self) -> bool:
        """Whether no other child of the test lives: what it has open there is closed at its end."""
        return not children_left(besides=self._process.pid)

    def hang(self) -> None:
        """Nothing is answered any more."""
        os.kill(self._process.pid, signal.SIGSTOP)
        # Until one of its threads has heard of it, the others answer.
        until(self._stands_still, "farfs to stop")

    def _stands_still(self) -> bool:
        states = []
        for thread in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                states.append(thread.read_text().rpartition(")")[2].split()[0])
        return set(states) <= set("TZX")

    def answer(self) -> None:
        """As if nothing had been."""
        self.behaves()
        os.kill(self._process.pid, signal.SIGCONT)

    def die(self) -> None:
        """Whoever waits gets an error, and so does whoever comes later."""
        os.kill(self._process.pid, signal.SIGKILL)  # not by Popen: stagers call this as well

    def end(self) -> None:
        if self._process.poll() is None:
            self.die()
            self._process.wait()

    def unmount(self) -> None:
        unmount(self.point)
