"""Runs the minute's work of a node below a folder, by the real commands as its processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from forestage.clock import Clock
from forestage.commands import tend
from forestage.commands.tend import TendPart
from forestage.config import load_config
from forestage.features.contexts import TendFacts
from forestage.paths import NodePaths
from forestage.system import lock, processes
from forestage.system.run import RunningProcess
from node import HANGS, until

COMMAND = """#!{python}
import sys
from pathlib import Path
from forestage.cache import disk_probe
from forestage.commands.main import CommandContext, main
from forestage.clock import Clock
from forestage.paths import NodePaths
{before}
main(obj=CommandContext(NodePaths(Path({root!r})), Clock()))
"""
LOOKS = 20  # in a row
BLIND = """
if sys.argv[1] == "evict":  # its disk stops at the moment after it was asked
    disk_probe.check_writable = disk_probe.check_readable = lambda *_: None
"""


class Tended:
    """A node's minute: `run` is one, of which each part that is waited for may take its time.

    But for those in `stuck`: such a part is waited for until its process hangs, and is at its limit
    then. `started` are the processes, by part.
    """

    def __init__(self, places: NodePaths, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.places = places
        self.program = folder / "forestage"
        self.program.write_text(
            COMMAND.format(python=sys.executable, root=str(places.root), before=BLIND)
        )
        self.program.chmod(0o755)
        patch.setattr(sys, "argv", [str(self.program), "tend"])
        patch.setattr(tend, "RUN_SECONDS", HANGS)
        self.stuck: Mapping[str, object] = {}
        self.started: list[tuple[str, int]] = []
        self.environ = dict(os.environ)

    def run(self, clock: Clock | None = None) -> dict[str, tuple[str, int]]:
        """What became of each part: its state, and its exit status."""
        ends = tend.run_due_parts(self.places, clock or Clock(), self.parts(), self.start)
        return {one.name: (one.state, one.code) for one in ends}

    def parts(self) -> Iterator[TendPart]:
        config = load_config(self.places.etc).node_config
        for part in tend.list_parts(TendFacts(self.places, Clock(), config, False), False):
            limit = 0.01 if part.name in self.stuck else HANGS
            yield msgspec.structs.replace(part, limit=limit if part.limit else 0.0)

    def start(self, part: TendPart, held: int | None) -> RunningProcess:
        started = tend.start_part(self.environ, part, held)
        self.started.append((part.name, started.pid))
        if happens := self.stuck.get(part.name):
            assert callable(happens)
            until(lambda: happens(started.pid), f"{part.name} to hang")
        return started

    def pids(self, name: str) -> list[int]:
        """The processes of a part that were started, in their order."""
        return [pid for part, pid in self.started if part == name]

    def is_free(self, name: str) -> bool:
        return lock.is_free(tend.part_lock_path(self.places, name))

    def wait(self, *names: str) -> None:
        """Waits until the last processes of these parts have ended."""
        for name in names:
            until(lambda name=name: self.is_free(name), f"the end of {name}")  # type: ignore[misc]


def hangs(pid: int) -> bool:
    """Whether a process waits in the kernel, where no signal reaches it; not for a moment only."""
    for _ in range(LOOKS):
        if processes.read_stat(Path(f"/proc/{pid}")).state != "D":
            return False
        time.sleep(0.01)
    return True
