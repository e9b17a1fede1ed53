"""What the processes of a cluster's nodes cost while bench/peers measures: CPU, memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forestage.cache.part import PROCESS_NAME

TICKS = os.sysconf("SC_CLK_TCK")
STAGER = PROCESS_NAME[:15]  # as the kernel keeps it
SERVICE = "forestage"
EVERY = 0.5  # seconds; looking takes processors from those that are looked at


@dataclass
class ProcessLoad:
    """Of one kind of process: CPU-seconds of all together, the most memory that one had (bytes)."""

    cpu: float = 0.0
    memory: int = 0


@dataclass
class ProcessWatch:
    """Looks now and then, as long as it is entered, at processes that end when they are done.

    `busy`: how much of all this machine's processors was used, from 0 to 1, by whomever.
    """

    networks: frozenset[int]  # inodes of the nodes' network namespaces
    busy: float = 0.0
    _before: dict[int, float] = field(default_factory=dict)
    _last: dict[int, tuple[str, float, int]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> ProcessWatch:
        self._look()
        self._before = {pid: cpu for pid, (_, cpu, _) in self._last.items()}
        self._ticks = read_processor_ticks()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        busy, total = (
            now - then for now, then in zip(read_processor_ticks(), self._ticks, strict=True)
        )
        self.busy = busy / max(1, total)

    def load(self, name: str) -> ProcessLoad:
        load = ProcessLoad()
        for pid, (comm, cpu, memory) in self._last.items():
            if comm == name:
                load.cpu += cpu - self._before.get(pid, 0.0)
                load.memory = max(load.memory, memory)
        return load

    def _watch(self) -> None:
        while not self._stop.wait(EVERY):
            self._look()

    def _look(self) -> None:
        for pid in _list_pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self._note(pid)

    def _note(self, pid: int) -> None:
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
        if comm not in (STAGER, SERVICE):
            return
        known = self._last.get(pid)
        if known is None and os.stat(f"/proc/{pid}/ns/net").st_ino not in self.networks:
            return
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(words[11]) + int(words[12])) / TICKS  # proc(5): utime, stime
        memory = _read_anonymous_memory(Path(f"/proc/{pid}/status").read_text())
        self._last[pid] = (comm, cpu, max(memory, known[2] if known else 0))


def read_processor_ticks() -> tuple[int, int]:
    """Ticks that all processors together were busy, and that have gone by."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _list_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read_anonymous_memory(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0  # it has just ended
