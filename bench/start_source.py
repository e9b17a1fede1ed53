"""A shared file system for bench/start that gives so many bytes a second, to all readers together.

It is ext4 on a loop device whose file is in memory, read-only; the kernel limits what the device
gives (cgroup v1, blkio.throttle). All processes of a cluster are in one cgroup of that controller,
stagers and servers as well as jobs: so they share the limit. For a latency the loop device's file
lies in a FUSE file system that answers each read later (tests/faults/farfs.c), and is read past the
page cache; reads may wait side by side.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster, ClusterError
from host import wait_until
from start_image import MIB

FARFS = Path(__file__).parents[1] / "tests/faults/farfs.c"
BLKIO = Path("/sys/fs/cgroup/blkio")
LIMIT = "blkio.throttle.read_bps_device"
LONG_AGO = 1_700_000_000
SECTOR = 512  # bytes; the unit of /sys/dev/block/*/stat whatever the disk's own is


@dataclass(frozen=True)
class LimitedDisk:
    """What the nodes have mounted; `number` as 7:1."""

    number: str
    limit: Path

    def slow(self, rate: float) -> None:
        """Limits it to so many bytes a second, from all its readers together; 0 is no limit."""
        self.limit.write_text(f"{self.number} {int(rate)}")

    def given(self) -> int:
        """Bytes that were read from it so far, by anybody."""
        # Field 3 of Documentation/block/stat.rst: sectors read.
        return int(Path("/sys/dev/block", self.number, "stat").read_text().split()[2]) * SECTOR


@contextlib.contextmanager
def mount_on_nodes(
    cluster: Cluster, tree: Path, at: str, latency_ms: int, work: Path
) -> Iterator[LimitedDisk]:
    """Mounts what is in `tree` on all nodes. Raises ClusterError where nothing can limit it."""
    limit = _find_own_cgroup() / LIMIT
    if not limit.exists():
        raise ClusterError(f"no {limit} (this needs cgroup v1's blkio; --nodes 8 does not)")
    file = _make_disk_file(tree, work)
    with contextlib.ExitStack() as stack:
        if latency_ms:
            file = stack.enter_context(_delay_reads(file, latency_ms, work))
        loop = _attach_loop(file, direct=bool(latency_ms))
        try:
            number = Path("/sys/class/block", Path(loop).name, "dev").read_text().strip()
            disk = stack.enter_context(_remove_limit_at_end(LimitedDisk(number, limit)))
            # Else it is as the last one who had this device left it. 128 KiB are NFS' and FUSE's.
            subprocess.run(["blockdev", "--setra", "256", loop], check=True)
            cluster.run(["mkdir", at], user="root")
            for node in cluster.nodes:
                cluster.run(["mount", "-o", "ro", loop, at], user="root", node=node)
        finally:
            # A mounted one stays until the node's mounts go, and that is with the cluster.
            subprocess.run(["losetup", "--detach", loop], check=True)
        yield disk


@contextlib.contextmanager
def mount_here(tree: Path, work: Path) -> Iterator[tuple[LimitedDisk, Path]]:
    """The same without a cluster, for the processes of this namespace: mounted below `work`."""
    limit, shown = _find_own_cgroup() / LIMIT, work / "shared"
    if not limit.exists():
        raise ClusterError(f"no {limit} (this needs cgroup v1's blkio)")
    loop = _attach_loop(_make_disk_file(tree, work), direct=False)
    try:
        number = Path("/sys/class/block", Path(loop).name, "dev").read_text().strip()
        with _remove_limit_at_end(LimitedDisk(number, limit)) as disk:
            shown.mkdir()
            subprocess.run(["mount", "-o", "ro", loop, shown], check=True)
            yield disk, shown
            subprocess.run(["umount", "--lazy", shown], check=True)
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)


@contextlib.contextmanager
def _remove_limit_at_end(disk: LimitedDisk) -> Iterator[LimitedDisk]:
    """The loop device may serve somebody else later: its limit goes, also if this is killed."""
    lift = f"read -r _; echo '{disk.number} 0' >{disk.limit}"
    watcher = subprocess.Popen(["sh", "-c", lift], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield disk
    finally:
        watcher.communicate()


def _make_disk_file(tree: Path, work: Path) -> Path:
    disk = work / "shared.ext4"
    size = sum(one.stat().st_size for one in tree.rglob("*"))
    disk.touch()
    os.truncate(disk, size + size // 20 + 16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-d", tree, disk], check=True)
    for file in tree.iterdir():
        # Of an image that has just changed a copy waits for 2 s; starting ones are older.
        for field in ("ctime", "mtime"):
            old = ["debugfs", "-w", "-R", f"set_inode_field /{file.name} {field} @{LONG_AGO}", disk]
            subprocess.run(old, check=True, capture_output=True)
    return disk


def _attach_loop(disk: Path, direct: bool) -> str:
    argv = ["losetup", "--find", "--show", "--read-only", *(["--direct-io=on"] if direct else [])]
    return subprocess.run(
        [*argv, str(disk)], check=True, capture_output=True, text=True
    ).stdout.strip()


def _find_own_cgroup() -> Path:
    """That of this process, and so of all that it starts."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return BLKIO / path[1:]
    return BLKIO


@contextlib.contextmanager
def _delay_reads(disk: Path, latency_ms: int, work: Path) -> Iterator[Path]:
    """The same file, each read of which takes so much longer."""
    program, control, view = work / "farfs", work / "farfs.control", work / "far"
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["gcc", "-O1", "-o", program, FARFS, *flags], check=True)
    control.write_text(f"delay {latency_ms}\n")
    view.mkdir()
    server = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", program, disk.parent, control, view, "ro"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a ^C is for the bench
    )
    try:
        shown = view / disk.name
        wait_until(shown.exists, 10, lambda: "farfs does not answer")
        yield shown
    finally:
        server.kill()
        server.wait()
        subprocess.run(["umount", "--lazy", view], check=True)
