"""What a chunk costs whoever gives it and whoever takes it: one service, one copy. For bench/peers.

Both on loopback, the giver's copy in its page cache, the taker's on a disk past it; `cp` and a sync
of the same bytes beside them, in the same round.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from forestage.cache import source_image
from forestage.cache.part import Part
from forestage.cache.source_image import AccessRights, SourceImage
from forestage.features.peers import find_peer_client
from forestage.features.peers.engine import PeerHelpers
from forestage.sources import source
from forestage.sources.source import OpenImage
from forestage.stage import engines
from forestage.system.as_user import User
from peering import Node

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 4 * MIB
NICE = 10  # as in forestage-peer.service
RATE = 125_000_000  # bytes a second that are taken beside a job: 1 Gbit/s


class ProcessCostPerGib(NamedTuple):
    """CPU-seconds for each GiB."""

    giver: float
    taker: float
    cp: float


class PeerPair:
    """A node that has a file of `mib` MiB, and copies of it by another one."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder, self.size = folder, mib * MIB
        self.source = folder / "source"
        self.node = Node(folder / "n1")
        command = f"head -c {self.size} /dev/urandom > {shlex.quote(str(self.source))}"
        subprocess.run(["sh", "-c", command], check=True)
        fd = os.open(self.source, os.O_RDONLY)
        self.image = SourceImage(
            source_image.read_identity(fd, str(self.source)), AccessRights(0, 0, 0o600)
        )
        self.node.give(self.image, self.source, CHUNK)

    def cost(self) -> ProcessCostPerGib:
        assert self.node.process is not None
        before = _read_thread_cpu(self.node.process.pid)
        shutil.rmtree(self.folder / "part", ignore_errors=True)  # here, at nobody's expense
        taker = _wait_for_child(_fork_work(self.take))
        giver = _read_thread_cpu(self.node.process.pid) - before
        target = self.folder / "copy"
        target.unlink(missing_ok=True)
        command = f"cp {self.source} {target} && exec sync {target}"
        cp = _wait_for_child(_fork_work(lambda: os.execvp("sh", ["sh", "-c", command])))
        return ProcessCostPerGib(*(seconds * GIB / self.size for seconds in (giver, taker, cp)))

    def take(self) -> None:
        """As a stager does it."""
        config = msgspec.structs.replace(self.node.config, chunk_size=CHUNK)
        fd = os.open(self.source, os.O_RDONLY)
        content = source.open_source(OpenImage(self.image, User("root", 0, 0), fd))
        shutil.rmtree(self.folder / "part", ignore_errors=True)
        part = Part(self.folder / "part" / self.image.key)
        part.directory.mkdir(parents=True)
        peers = find_peer_client(config, "n2", "n[1-2]", self.image.key, self.node.places)
        engine = engines.choose_engine(config, self.size)
        engine.reserve(content, part)
        engine.copy(content, part, threading.Event(), PeerHelpers(peers) if peers else None)
        with part.image.open("rb") as file:
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def taken(self, cpu: int) -> Iterator[None]:
        """Copies one after the other on this processor, as long as it is entered."""

        def take() -> None:
            os.sched_setaffinity(0, {cpu})
            while True:
                self.take()

        pid = _fork_work(take)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def measure_costs(mib: int, rounds: int = 5) -> ProcessCostPerGib:
    """Medians."""
    with tempfile.TemporaryDirectory() as folder:
        pair = PeerPair(Path(folder), mib)
        with pair.node.serving():
            pair.cost()  # what is made once: files, the session
            each = zip(*(pair.cost() for _ in range(rounds)), strict=True)
            return ProcessCostPerGib(*map(statistics.median, each))


def measure_job_slowdown(mib: int, pairs: int) -> list[float]:
    """How many times as long a job took on the giver's own processor while it gave at RATE."""
    first, *_, last = sorted(os.sched_getaffinity(0)) * 2
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        pair = PeerPair(Path(folder), mib)
        pair.node.configure(bandwidth=RATE)
        with pair.node.serving():
            assert pair.node.process is not None
            os.setpriority(os.PRIO_PROCESS, pair.node.process.pid, NICE)
            os.sched_setaffinity(pair.node.process.pid, {first})
            for _ in range(pairs):
                alone = _time_busy_job(first)
                with pair.taken(last):
                    ratios.append(_time_busy_job(first) / alone)
    return ratios


def _time_busy_job(cpu: int) -> float:
    """Seconds of a job of one thread that computes."""

    def work() -> None:
        os.sched_setaffinity(0, {cpu})
        data = bytes(MIB)
        for _ in range(1024):
            hashlib.sha256(data).digest()

    start = time.perf_counter()
    _wait_for_child(_fork_work(work))
    return time.perf_counter() - start


def _fork_work(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def _wait_for_child(pid: int) -> float:
    """The CPU-seconds of a child that has ended well."""
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit("bench/peers: a copy failed")
    return usage.ru_utime + usage.ru_stime


def _read_thread_cpu(pid: int) -> float:
    """CPU-seconds of a process' threads so far; /proc/PID/stat has only hundredths."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[0]) for one in files) / 1e9
