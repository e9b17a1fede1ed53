"""A shared file system of our own that can be slow, stop answering, and die; see farfs.c."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from node import ALICE, Node, until


class Far:
    """Lies in the node's `sources` beside the healthy one. In a private mount namespace only."""

    def __init__(self, program: Path, node: Node, control: Path) -> None:
        self.node = node
        self.folder = node.server / ".far"
        self.folder.mkdir()
        self.point = node.shared / "far"
        self.point.mkdir()
        self._control = control
        argv = [program, self.folder, control, self.point]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        until(lambda: os.path.ismount(self.point), "farfs to mount")

    def put(self, name: str, data: bytes) -> Path:
        """Puts a file there; gives its path on the node."""
        file = self.folder / name
        file.write_bytes(data)
        os.chown(file, ALICE.uid, ALICE.gid)
        return self.point / name

    def reads_wait(self, milliseconds: int) -> None:
        """How long each read takes from now on; -1 is for ever, while all else is answered."""
        # Written beside and renamed: a reader must not find it empty.
        new = self._control.with_suffix(".new")
        new.write_text(str(milliseconds))
        new.replace(self._control)

    def hang(self) -> None:
        """Nothing is answered any more."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def answer(self) -> None:
        """As if nothing had been."""
        self.reads_wait(0)
        os.kill(self._process.pid, signal.SIGCONT)

    def die(self) -> None:
        """Whoever waits gets an error, and so does everybody after him."""
        os.kill(self._process.pid, signal.SIGKILL)  # not by Popen: stagers call this as well

    def end(self) -> None:
        if self._process.poll() is None:
            self.die()
            self._process.wait()

    def unmount(self) -> None:
        subprocess.run(["umount", self.point], check=True)
