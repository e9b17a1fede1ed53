"""The tables behind bench/scale. In a mount namespace of its own, below a temporary root.

The hooks are whole processes with the environment slurmd gives them, all started before the first
ends. "Work" is their CPU time and that of the stagers they forked, from the kernel's account of
finished children (the stagers are adopted: this process is made their reaper).
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import busy
import msgspec

from forestage import events
from forestage.cache import evict, source_image
from forestage.cache.layout import PROVEN, Cache, Entry
from forestage.cache.node import Node
from forestage.cache.source_image import AccessRights, SourceImage
from forestage.clock import Clock, Deadline
from forestage.config import Config
from forestage.paths import NodePaths
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.sources.source import OpenImage
from forestage.stage import copy_wait
from forestage.system.as_user import User

FEW = 10  # entries
SOME = 1_000
TMPFS = ("mnt/nvme", "run")  # what a node has on its NVMe and on a tmpfs
IMAGE_BYTES = 8 * 1024 * 1024
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
NOBODY = User("nobody", 65534, 65534)
HOOK = """
import sys, time, os
from pathlib import Path
from forestage.clock import Clock
from forestage.hooks.boundary import HookRun
from forestage.paths import NodePaths
HookRun(sys.argv[1], os.environ, time.monotonic()).run(NodePaths(Path(sys.argv[2])), Clock())
os._exit(0)
"""


class HookStorm(NamedTuple):
    """What hooks at once did: results, copies made, seconds, CPU seconds."""

    results: Counter[str]
    copies: int
    wall: float
    cpu: float


def make_empty_node(root: Path) -> NodePaths:
    """An empty node below `root`, its cache and its /run on a tmpfs each."""
    for name in ("mnt/nvme", "run", "shared", "etc/forestage"):
        (root / name).mkdir(parents=True)
    for name in TMPFS:
        subprocess.run(["mount", "-t", "tmpfs", "none", root / name], check=True)
    config = f"sources: [{root / 'shared'}]\ncold: wait\n"
    (root / "etc/forestage/forestage.yaml").write_text(config)
    return NodePaths(root)


def clear_node(places: NodePaths) -> None:
    for name in TMPFS:
        subprocess.run(["umount", places.root / name], check=True)


def publish_entries(cache: Cache, count: int) -> None:
    """Publishes `count` small entries as the stager would leave them."""
    for number in range(count):
        identity = source_image.FileIdentity(f"/shared/{number}", number, 4096, number, number)
        entry = Entry(identity.key, identity, AccessRights(0, 0, 0o644), float(number), "chunks")
        directory = cache.entry_dir(entry.key)
        directory.mkdir()
        (directory / "image").write_bytes(bytes(4096))
        (directory / "entry.json").write_bytes(msgspec.json.encode(entry))
        (directory / "used").touch()
        (directory / "boot").write_bytes(PROVEN)


def measure_call_ms(work: object, times: int) -> float:
    """Median milliseconds of a call."""
    assert callable(work)
    took = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1000


def measure_by_entries(count: int) -> tuple[float, float, float]:
    """Milliseconds of a hit's look-up, of reading all entries and of the plan."""
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/var/tmp") as folder:
        places = make_empty_node(Path(folder))
        try:
            config = Config(sources=(str(places.root / "shared"),))
            node = Node.from_config(config, places, Clock())
            node.cache.prepare(require_mount=True)
            publish_entries(node.cache, count)
            return measure_node(node)
        finally:
            clear_node(places)


def measure_node(node: Node) -> tuple[float, float, float]:
    some = node.cache.list_entries()[0].entry
    assert some is not None
    opened = OpenImage(SourceImage(some.identity, some.access), NOBODY, -1)
    job = Job(1, NOBODY, "", "", "/", (), None, JobHints())
    end = Deadline.after(60, node.clock)

    def look() -> None:
        with copy_wait.ensure_copy_started(node, job, opened) as copying:
            copy_wait.wait_for_copy(node, job, opened, copying, end)

    hit = measure_call_ms(look, 200)
    read = measure_call_ms(node.cache.list_entries, 5)
    stored = node.cache.list_entries()
    room = evict.measure_space(node.cache, stored, node.config)
    goal = evict.EvictionGoal(free=0, used=room.used // 2)
    plan = measure_call_ms(lambda: evict.plan(stored, frozenset(), room, goal), 5)
    return hit, read, plan


def run_storm(hooks: int, images: int) -> HookStorm:
    """All hooks at once, spread evenly over `images` images."""
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/var/tmp") as folder:
        places = make_empty_node(Path(folder))
        os.chmod(folder, 0o755)
        try:
            paths = [places.root / f"shared/{number}" for number in range(images)]
            for path in paths:
                # With the magic, the version and the length of a squashfs: else nothing is staged.
                head = (
                    b"hsqs" + bytes(24) + b"\4\0\0\0" + bytes(8) + IMAGE_BYTES.to_bytes(8, "little")
                )
                path.write_bytes(head + os.urandom(IMAGE_BYTES - len(head)))
            return start_all_hooks(places, hooks, paths)
        finally:
            for path in paths:
                subprocess.run(["umount", "-q", path], check=False, stderr=subprocess.DEVNULL)
            clear_node(places)


def start_all_hooks(places: NodePaths, hooks: int, paths: Sequence[Path]) -> HookStorm:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    running = [start_prolog(places, job, paths[job % len(paths)]) for job in range(hooks)]
    codes = [process.wait() for process in running]
    wall = time.perf_counter() - start
    wait_for_stagers()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if any(codes):
        raise SystemExit(f"bench/scale: hooks failed: {Counter(codes)}")
    told = list(events.read_events(places.events))
    results = Counter(event.outcome.result for event in told if event.hook == "prolog")
    copies = sum(event.hook == "stager" for event in told)
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return HookStorm(results, copies, wall, used)


def start_prolog(places: NodePaths, job: int, path: Path) -> subprocess.Popen[bytes]:
    environ = {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": str(NOBODY.uid),
        "SLURM_JOB_GID": str(NOBODY.gid),
        "SLURM_JOB_USER": NOBODY.name,
        "SPANK__SLURM_SPANK_OPTION_pyxis_container_image": str(path),
    }
    argv = [sys.executable, "-I", "-c", HOOK, "prolog", str(places.root)]
    return subprocess.Popen(argv, env=environ, stderr=subprocess.DEVNULL)


def wait_for_stagers() -> None:
    """Waits for the stagers, which outlive their hooks."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> None:
    options = busy.BenchOptions("scale", __doc__, "3 minutes")
    options.add_argument("entries", nargs="?", type=int, default=10_000, help="at most")
    options.add_argument("hooks", nargs="?", type=int, default=200, help="at once")
    given, load = options.begin(), busy.MachineLoad()
    most, hooks = given.entries, given.hooks
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(f"{'entries':>8} {'hit ms':>9} {'read all ms':>12} {'plan ms':>9}")
    rows = {}
    for count in [*(count for count in (FEW, SOME) if count < most), most]:
        rows[count] = measure_by_entries(count)
        print(f"{count:8} {rows[count][0]:9.3f} {rows[count][1]:12.1f} {rows[count][2]:9.2f}")
    print(f"\n{hooks} hooks at once, images of {IMAGE_BYTES >> 20} MiB")
    print(f"{'images':>8} {'copies':>7} {'wall s':>7} {'CPU s':>7}  results")
    storms = {images: run_storm(hooks, images) for images in (1, 20)}
    for images, one in storms.items():
        results = ", ".join(f"{number} {word}" for word, number in sorted(one.results.items()))
        print(f"{images:8} {one.copies:7} {one.wall:7.1f} {one.cpu:7.1f}  {results}")
    print()
    figures = (
        f"hit_{most}_over_{FEW}={rows[most][0] / rows[FEW][0]:.2f}"
        f" plan_{most}_ms={rows[most][2]:.0f}"
        f" copies_1={storms[1].copies} copies_20={storms[20].copies}"
        f" work_20_over_1={storms[20].cpu / storms[1].cpu:.2f}"
    )
    print(load.last(figures))


if __name__ == "__main__":
    main()
