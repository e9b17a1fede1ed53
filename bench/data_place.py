"""Where bench/data measures: a far file server, a disk, and a node whose hooks are run for real.

All in memory, below a tmpfs of this program's own mount namespace: it is the source that is
measured. The disk is ext4 on a loop device. Whatever is mounted anew has nothing in the page cache.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from host import wait_until

from forestage.cache.job_notes import DirectoryCopyState
from forestage.cache.node import Node as Bare
from forestage.clock import Clock
from forestage.config import load_config
from forestage.events import RequestOutcome
from forestage.features.data import data_view
from forestage.features.data import requests as data
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.job import Job
from forestage.system import loop, mounts
from node import ALICE, Node

MIB = 1 << 20
KIB = 1 << 10
SMALLEST, LARGEST = 4 * KIB, 400 * KIB  # of the small files; uniform in the logarithm
EACH = 200  # small files in a directory
LARGE = 64  # number of large files
LONG_AGO = 1_700_000_000  # what has just changed is looked at twice
SOURCE = Path(__file__).with_name("data_source.c")


def make_trees(top: Path, files: int, large: int) -> dict[str, int]:
    """Makes the trees `small` and, of files of `large` MiB, `large`; the bytes of each."""
    noise, chance, bytes_of = os.urandom(LARGEST + 64 * KIB), random.Random(1), {}
    sizes = [int(SMALLEST * (LARGEST / SMALLEST) ** chance.random()) for _ in range(files)]
    for number, size in enumerate(sizes):
        file = top / f"small/{number // EACH:04}/{number:06}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        start = chance.randrange(64 * KIB)
        file.write_bytes(noise[start : start + size])
    bytes_of["small"] = sum(sizes)
    for number in range(LARGE if large else 0):
        file = top / f"large/{number:02}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            for _ in range(large):
                opened.write(os.urandom(MIB))
    bytes_of["large"] = large * LARGE * MIB
    for path in (top, *top.rglob("*")):
        os.chown(path, ALICE.uid, ALICE.gid)
        os.utime(path, (LONG_AGO, LONG_AGO))
    return bytes_of


class DataBenchNode:
    """A node below `top`, its disk, and the file server's `files` as the node sees them."""

    def __init__(self, top: Path, files: Path, latency_ms: float, rate: float, disk: int) -> None:
        self.node = Node(top)
        self.files = files
        self.argv = [str(top / "data_source"), str(files), str(self.node.shared)]
        self.argv += [str(round(latency_ms * 1000)), str(round(rate))]
        self.top = top
        self.disk = top / "disk"
        self.server: subprocess.Popen[bytes] | None = None
        for point in (self.node.shared, self.node.nvme):
            point.mkdir(parents=True)
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        subprocess.run(["gcc", "-O2", "-o", self.argv[0], SOURCE, *flags, "-lpthread"], check=True)
        self.disk.touch()
        os.truncate(self.disk, disk)
        # An inode for each 8 KiB: there are many small files.
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-i", "8192", self.disk], check=True)
        self.device = ""

    @property
    def local(self) -> Path:
        """Where the rivals copy to."""
        return self.node.nvme / "copy"

    def forget(self) -> None:
        """Has nothing of source and disk in the page cache, by mounting both anew."""
        self.let_go()
        self.device = loop.attach_file(self.disk, read_only=False)
        mounts.mount(self.device, str(self.node.nvme), 0, "ext4", "discard")
        self.server = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL)
        wait_until(lambda: os.path.ismount(self.node.shared), 30, lambda: "the source is not there")

    def let_go(self) -> None:
        """Unmounts all, once the stagers have ended."""
        if self.server is None:
            return
        here = self.node.nvme.stat()
        for one in loop.list_attached_devices():
            # Not by their names: those of another mount namespace may be the same.
            if one.is_on_file_system(here):
                loop.detach_device(one)
        points = (self.node.shared, self.node.nvme)
        wait_until(lambda: all(map(_wait_for_unmount, points)), 60, lambda: f"{points} are in use")
        assert self.server.wait(60) == 0
        self.server = None
        subprocess.run(["losetup", "--detach", self.device], check=True)

    def empty(self) -> None:
        """Has nothing on the disk, and no job."""
        for path in (self.local, self.node.cache.root):
            subprocess.run(["rm", "-rf", path], check=True)
        self.local.mkdir()
        os.chown(self.local, ALICE.uid, ALICE.gid)
        for job in range(1, 1000):
            if self.node.leases.lease_file(job).exists():
                self.node.leases.drop_lease(job)
        self.sync()

    def sync(self) -> None:
        subprocess.run(["sync", "--file-system", self.node.nvme], check=True)

    # What the hooks do

    def begin(self, job: int, tree: str) -> RequestOutcome:
        environ = self.node.environ(job, user=ALICE, comment=f"stage={self.node.shared / tree}/")
        limit = HookDeadlines.from_seconds(Clock(), 600.0, None)
        (outcome,) = data.start_job_data(self._bare(), Job.from_environ(environ), limit, None)
        assert outcome.result == "started", outcome
        return outcome

    def await_ready(self, job: int, tree: str) -> None:
        path = f"{self.node.shared / tree}/"

        def found() -> DirectoryCopyState | None:
            one = data_view.read_job_data(self.node.leases, job).trees.get(path)
            assert one is None or one.state != "declined", one
            return one if one and one.state == "ready" else None

        wait_until(found, 1200, lambda: f"{tree} is not ready", every=0.01)

    def show(self, job: int) -> str:
        """The block device that a step of the job is shown."""
        environ = self.node.environ(job, user=ALICE)
        limit = HookDeadlines.from_seconds(Clock(), 600.0, None)
        shown = data.show_job_data(self._bare(), Job.from_environ(environ), limit, None)
        assert shown.lines, shown.outcomes
        return shown.lines[0][1]

    def _bare(self) -> Bare:
        config = load_config(self.node.places.etc).for_partition("batch")
        return Bare(config, self.node.places, self.node.cache, self.node.leases, Clock())


@contextlib.contextmanager
def make_node(place: DataBenchNode) -> Iterator[DataBenchNode]:
    place.node.configure(redirect="spank", chunk_size=None, min_free=0)
    place.forget()
    try:
        yield place
    finally:
        place.let_go()


def wait_for_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _wait_for_unmount(point: Path) -> bool:
    """The process that brings a tree says that it is ready before it ends."""
    with contextlib.suppress(OSError):
        if os.path.ismount(point):
            mounts.umount(str(point), 0)
    return not os.path.ismount(point)
