"""The table behind bench/growth: each curve at its smallest and its largest size.

Hooks are whole processes with the environment that slurmd gives them, on a node below a temporary
root, in a mount namespace of its own. Counted are their system calls and those of the stagers that
they leave behind (strace -c -f): a count says the same on a busy machine. Its ratio may be 1.3 at
most, or the bench fails: who reads all entries in a hook has thousands more. CPU times stand beside
it, medians of several runs without strace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import busy
import scale_table
from scale_table import HOOK, NOBODY, PR_SET_CHILD_SUBREAPER

from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_config
from forestage.paths import NodePaths

FEW = 10  # of what grows
BOUND = 1.3
DISK, HELD = 2048, 1200  # MiB of the cache's tmpfs, and of others' files where they hold it
IMAGE_BYTES = 65_536
# of strace's table: % time, seconds, µs a call, calls, errors
TOTAL = re.compile(r"^\s*100\.00\s+\S+\s+(?:\S+\s+)?(\d+)\s+\d*\s*total$", re.MULTILINE)


class GrowthNode:
    """A node whose hooks show copies by the companion; `job` is the next one's number."""

    def __init__(self, root: Path, lines: int) -> None:
        self.places = NodePaths(root)
        self.job = 0
        for name in ("mnt/nvme", "run", "shared", "etc/forestage"):
            (root / name).mkdir(parents=True)
        for name in ("mnt/nvme", "run"):
            options = f"size={DISK}m,nr_inodes=1m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", root / name], check=True)
        self.shared = root / "shared"
        config = {"sources": [str(self.shared)], "cold": "wait", "redirect": "spank"}
        # Others may hold more than this: room is what an Epilog makes sure of.
        config |= {"max_size": "1500M", "min_free": "1%", "low_watermark": "30%", "unpack_ratio": 0}
        (root / "etc/forestage/forestage.yaml").write_text(json.dumps(config))
        self.slurm_conf = root / "slurm.conf"
        partitions = (f"PartitionName=p{number} Nodes=n1" for number in range(lines))
        self.slurm_conf.write_text("\n".join(["BatchStartTimeout=60", *partitions, ""]))
        self.places.loaded.parent.mkdir(parents=True)
        self.places.loaded.touch()
        self.node = Node.from_config(load_config(self.places.etc).config, self.places, Clock())
        self.node.cache.prepare(require_mount=True)

    def image(self) -> Path:
        path = self.shared / os.urandom(8).hex()
        length = IMAGE_BYTES.to_bytes(8, "little")
        head = b"hsqs" + bytes(24) + b"\4\0\0\0" + bytes(8) + length
        path.write_bytes(head + os.urandom(IMAGE_BYTES - len(head)))
        os.chown(path, NOBODY.uid, NOBODY.gid)
        return path

    def argv(self, hook: str) -> list[str]:
        return [sys.executable, "-I", "-c", HOOK, hook, str(self.places.root)]

    def environ(self, image: Path | None) -> dict[str, str]:
        facts = {
            "SLURM_CONF": str(self.slurm_conf),
            "SLURM_JOB_ID": str(self.job),
            "SLURM_JOB_UID": str(NOBODY.uid),
            "SLURM_JOB_GID": str(NOBODY.gid),
            "SLURM_JOB_USER": NOBODY.name,
            "SLURM_JOB_PARTITION": "p0",
            "SLURM_JOB_WORK_DIR": "/",
            "SLURMD_NODENAME": "n1",
        }
        if image:
            facts["SPANK__SLURM_SPANK_OPTION_pyxis_container_image"] = str(image)
        return facts

    def run(self, hook: str, image: Path | None) -> float:
        """Runs a hook, and waits for the stagers that it leaves; returns their CPU milliseconds."""
        before = _read_children_cpu_ms()
        self._wait(self.argv(hook), image)
        return _read_children_cpu_ms() - before

    def count(self, hook: str, image: Path | None) -> int:
        """Runs a hook; returns how many system calls it and its stagers made."""
        file = self.places.root / "calls"
        strace = ["strace", "--quiet=all", "-f", "-c", "-o", str(file)]
        self._wait([*strace, *self.argv(hook)], image)
        total = re.search(
            r"^\s*100\.00\s+\S+\s+(?:\S+\s+)?(\d+)\s+\d*\s*total$", file.read_text(), re.M
        )
        if total is None:
            raise SystemExit(f"bench/growth: strace says\n{file.read_text()}")
        return int(total[1])

    def _wait(self, argv: list[str], image: Path | None) -> None:
        hook = subprocess.Popen(argv, env=self.environ(image), stderr=subprocess.DEVNULL)
        if hook.wait():
            raise SystemExit(f"bench/growth: {argv[-2]} failed")
        scale_table.wait_for_stagers()


def _read_children_cpu_ms() -> float:
    """CPU milliseconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1000


@contextlib.contextmanager
def make_node(lines: int = 1) -> Iterator[GrowthNode]:
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        try:
            made = GrowthNode(Path(folder), lines)
            yield made
        finally:
            for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
                point = line.split()[4]
                if point.startswith(f"{folder}/"):
                    subprocess.run(["umount", "-l", point], check=True)


Curve = Callable[[GrowthNode, Callable[[str, Path | None], float]], float]
"""One case: what a hook costs on a node, by what `measure` says of its run."""


def measure_hit(node: GrowthNode, measure: Callable[[str, Path | None], float]) -> float:
    image = node.image()
    node.job += 1
    node.run("prolog", image)
    node.job += 1
    return measure("prolog", image)


def measure_cold_start(node: GrowthNode, measure: Callable[[str, Path | None], float]) -> float:
    node.job += 1
    return measure("prolog", node.image())


def measure_epilog(node: GrowthNode, measure: Callable[[str, Path | None], float]) -> float:
    node.job += 1
    image = node.image()
    node.run("prolog", image)
    return measure("epilog", image)


def measure_curve(node: GrowthNode, curve: Curve, runs: int) -> tuple[int, float]:
    """System calls, and the median of CPU milliseconds; what is first is not counted."""
    curve(node, node.run)
    calls = round(curve(node, node.count))
    return calls, statistics.median(curve(node, node.run) for _ in range(runs))


def measure_with_entries(count: int, curve: Curve, runs: int) -> tuple[int, float]:
    with make_node() as node:
        scale_table.publish_entries(node.node.cache, count)
        return measure_curve(node, curve, runs)


def measure_with_full_disk(count: int, curve: Curve, runs: int) -> tuple[int, float]:
    """Others hold more than the low watermark."""
    with make_node() as node:
        scale_table.publish_entries(node.node.cache, count)
        with (node.places.root / "mnt/nvme/others").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, HELD << 20)
        return measure_curve(node, curve, runs)


def measure_with_mounts(count: int, curve: Curve, runs: int) -> tuple[int, float]:
    with make_node() as node:
        for number in range(count):
            point = node.places.root / f"mounts/{number}"
            point.mkdir(parents=True)
            ctypes.CDLL(None).mount(b"none", os.fsencode(point), b"tmpfs", 0, b"size=4k")
        return measure_curve(node, curve, runs)


def measure_with_slurm_conf(count: int, curve: Curve, runs: int) -> tuple[int, float]:
    with make_node(lines=count) as node:
        return measure_curve(node, curve, runs)


CURVES: dict[str, tuple[str, Callable[[int, Curve, int], tuple[int, float]], Curve]] = {
    "hit": ("entries", measure_with_entries, measure_hit),
    "cold": ("entries", measure_with_entries, measure_cold_start),
    "epilog": ("entries", measure_with_entries, measure_epilog),
    "epilog_full": ("entries, others hold the disk", measure_with_full_disk, measure_epilog),
    "cold_full": ("entries, others hold the disk", measure_with_full_disk, measure_cold_start),
    "hit_mounts": ("mounts", measure_with_mounts, measure_hit),
    "epilog_mounts": ("mounts", measure_with_mounts, measure_epilog),
    "hit_conf": ("lines of slurm.conf", measure_with_slurm_conf, measure_hit),
}


def main() -> None:
    options = busy.BenchOptions("growth", __doc__, "4 minutes")
    options.add_argument("most", nargs="?", type=int, default=10_000, help="of what grows")
    options.add_argument("--runs", type=int, default=5, help="of which the median counts")
    given, load = options.begin(), busy.MachineLoad()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ratios = {}
    print(f"| hook, by | {FEW}: calls | ms | {given.most}: calls | ms | calls x | ms x |")
    print("|:--" + "|--:" * 6 + "|")
    for name, (by, size, curve) in CURVES.items():
        few, most = size(FEW, curve, given.runs), size(given.most, curve, given.runs)
        ratios[name] = most[0] / few[0]
        print(
            f"| {name.split('_')[0]}, {by} | {few[0]} | {few[1]:.0f} | {most[0]} | {most[1]:.0f}"
            f" | {ratios[name]:.2f} | {most[1] / few[1]:.2f} |",
            flush=True,
        )
    print(load.last(" ".join(f"{name}={ratio:.2f}" for name, ratio in ratios.items())))
    if max(ratios.values()) > BOUND:
        raise SystemExit(f"bench/growth: a hook makes more than {BOUND} times the calls")


if __name__ == "__main__":
    main()
