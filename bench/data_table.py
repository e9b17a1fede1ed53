"""The tables behind bench/data: how a directory reaches a node's disk, and what is read there.

The source is a FUSE file system with a latency and a rate (bench/data_source.c), the disk ext4 on
a loop device in memory. All rivals run as the user, from the same source to the same disk, and
count until the disk has it; `ours` is from the Prolog's call to the moment when the entry is ready.
Before each run both file systems are mounted anew, so that no page cache has anything. In each
round everything runs once, each round beginning with another; a ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
import data_nodes  # noqa: E402
from data_place import (  # noqa: E402
    KIB,
    LARGE,
    LARGEST,
    SMALLEST,
    DataBenchNode,
    make_node,
    make_trees,
    wait_for_children,
)
from memory import MEMORY, print_in_memory  # noqa: E402
from rounds import rotate_names  # noqa: E402

from forestage.system import mounts  # noqa: E402
from node import ALICE  # noqa: E402

GIB = 1 << 30
READERS = 8  # processes of an epoch, as data loaders have them
OURS, HIT, SHOWN = "ours", "  a further job's", "  a step's look"
AT_ONCE = 50
SMALL_FILES, LARGE_FILES = "small files", "large files"
RIVALS = {
    "rsync -a": "rsync -a {source}/ {target}/",
    "cp -r": "cp -r {source}/. {target}",
    "tar, untar": "tar -C {source} -cf - . | tar -C {target} -xf -",
    "cp, 8 at once": "cd {source} && find . -type d -print0 | (cd {target} && xargs -0 mkdir -p) &&"
    " find . -type f -print0 | xargs -0 -P 8 -n 32 cp --parents -t {target}",
}

Times = dict[str, list[float]]  # seconds, one for each round


def measure_rival(place: DataBenchNode, name: str, tree: str) -> float:
    """Seconds of one of `RIVALS`, run by the user."""
    place.empty()
    place.forget()
    line = RIVALS[name].format(source=place.node.shared / tree, target=place.local)
    line += f" && exec sync --file-system {shlex.quote(str(place.node.nvme))}"
    become = ["setpriv", f"--reuid={ALICE.uid}", f"--regid={ALICE.gid}", "--clear-groups"]
    start = time.perf_counter()
    subprocess.run([*become, "bash", "-o", "pipefail", "-c", line], check=True)
    return time.perf_counter() - start


def measure_forestage(place: DataBenchNode, tree: str, found: Times) -> None:
    """Times of the copy, of a job that finds it there, and of a step's look."""
    place.empty()
    for job, name in ((1, OURS), (2, HIT)):
        place.forget()
        start = time.perf_counter()
        place.begin(job, tree)
        place.await_ready(job, tree)
        found.setdefault(name, []).append(time.perf_counter() - start)
    place.forget()
    start = time.perf_counter()
    place.show(2)
    found.setdefault(SHOWN, []).append(time.perf_counter() - start)


def read_epoch(top: Path) -> float:
    """Seconds in which all files below are read, each whole, in an order of chance."""
    listed = sorted(path.relative_to(top) for path in top.rglob("*") if path.is_file())
    random.Random(len(listed)).shuffle(listed)
    start = time.perf_counter()
    children = []
    for number in range(READERS):
        if (child := os.fork()) == 0:
            for name in listed[number::READERS]:
                fd = os.open(top / name, os.O_RDONLY)
                while os.read(fd, LARGEST):
                    pass
                os.close(fd)
            os._exit(0)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] for child in children)
    if failed:
        raise SystemExit("bench/data: a reader failed")
    return time.perf_counter() - start


def measure_epochs(place: DataBenchNode, found: Times) -> None:
    """From the shared path, the mounted copy, and a plain copy, which is made of that."""
    image = place.top / "image"
    image.mkdir(exist_ok=True)

    def measured(name: str, top: Path) -> None:
        found.setdefault(name, []).append(read_epoch(top))

    place.forget()
    names = place.node.shared / "small"
    measured("shared path", names)
    for name in ("EROFS", "local directory"):
        place.forget()
        mounts.mount(place.show(2), str(image), mounts.MS_RDONLY, "erofs")
        if name == "EROFS":
            measured(name, image)
        else:
            subprocess.run(["cp", "-r", f"{image}/.", place.local], check=True)
        mounts.umount(str(image), 0)
    place.sync()
    place.forget()
    measured("local directory", place.local)


def measure_more_jobs(place: DataBenchNode, count: int) -> Iterator[str]:
    """How long the Prolog and the data of one job more take, as leases pile up."""
    place.empty()
    place.forget()
    begun, ready = [], []
    for job in range(1, count + 1):
        start = time.perf_counter()
        place.begin(job, "few")
        begun.append(time.perf_counter() - start)
        place.await_ready(job, "few")
        ready.append(time.perf_counter() - start)
        wait_for_children()
    yield "| job | Prolog ms | ready s |"
    yield "|--:" * 3 + "|"
    for job in sorted({1, 2, min(10, count), count}):
        # Of a few around it: one alone is what the machine did in that moment.
        near = slice(max(1, job - 3) if job > 2 else job - 1, job + 2 if job > 2 else job)
        times = [1000 * statistics.median(begun[near]), statistics.median(ready[near])]
        yield f"| {job} | {times[0]:.1f} | {times[1]:.2f} |"
    start = time.perf_counter()
    took = _measure_parallel_prologs(place, range(count + 1, count + 1 + min(AT_ONCE, count)))
    for job in range(count + 1, count + 1 + min(AT_ONCE, count)):
        place.await_ready(job, "few")
    seconds = time.perf_counter() - start
    yield (
        f"\n{len(took)} more at once: Prologs {1000 * statistics.median(took):.0f} ms, the longest"
        f" {1000 * max(took):.0f} ms; all ready after {seconds:.1f} s"
    )
    wait_for_children()


def _measure_parallel_prologs(place: DataBenchNode, numbers: range) -> list[float]:
    """Seconds of each job's Prolog, all begun at once."""
    lines = []
    for job in numbers:
        ours_end, theirs = os.pipe()
        if os.fork() == 0:
            try:
                start = time.perf_counter()
                place.begin(job, "few")
                os.write(theirs, str(time.perf_counter() - start).encode())
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.close(theirs)
        lines.append(ours_end)
    took = []
    for line in lines:
        with os.fdopen(line) as file:
            seconds = file.read()
        if not seconds:
            raise SystemExit("bench/data: a Prolog failed")
        took.append(float(seconds))
    return took


def print_progress(text: str) -> None:
    """One line for who waits; the tables are on stdout."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure_rounds(title: str, rounds: int, works: Mapping[str, Callable[[], None]]) -> None:
    names = list(works)
    for number in range(rounds):
        for name in rotate_names(names, number):
            print_progress(f"{title}, round {number + 1} of {rounds}: {name}")
            works[name]()
            wait_for_children()


def measure_copies(place: DataBenchNode, tree: str, title: str, rounds: int) -> Times:
    found: Times = {}

    def by(name: str) -> Callable[[], None]:
        return lambda: found.setdefault(name, []).append(measure_rival(place, name, tree))

    works = {name: by(name) for name in RIVALS}
    measure_rounds(title, rounds, {**works, OURS: lambda: measure_forestage(place, tree, found)})
    return found


def find_median_ratio(found: Mapping[str, list[float]], name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[to], strict=True))


def format_table(title: str, found: Mapping[str, list[float]], to: str) -> Iterator[str]:
    yield f"| {title} | s | from | to | : {to} |"
    yield "|:--" + "|--:" * 4 + "|"
    for name, times in found.items():
        figures = [
            statistics.median(times),
            min(times),
            max(times),
            find_median_ratio(found, name, to),
        ]
        yield f"| {name} | {' | '.join(f'{one:.2f}' for one in figures)} |"
    yield ""


def run_bench(options: argparse.Namespace, top: Path) -> Iterator[str]:
    start, load = time.monotonic(), busy.MachineLoad()
    files = top / "files"
    bytes_of = make_trees(files, options.files, options.large)
    _make_small_tree(files, options.files // 4)
    # Twice what is there at most, and data may have 60 % of it.
    disk = 4 * sum(bytes_of.values()) + GIB
    with make_node(DataBenchNode(top, files, options.latency, options.mbyte * 1e6, disk)) as place:
        yield from _format_results(options, bytes_of)
        small = measure_copies(place, "small", SMALL_FILES, options.rounds)
        yield from format_table(SMALL_FILES, small, OURS)
        if options.large:
            large = measure_copies(place, "large", LARGE_FILES, options.rounds)
            yield from format_table(LARGE_FILES, large, OURS)
        _, read = measure_forestage(place, "small", {}), {}
        title = f"epoch, {READERS} readers"
        measure_rounds(title, options.rounds, {"each way": lambda: measure_epochs(place, read)})
        yield from format_table(title, read, "EROFS")
        if options.jobs:
            print_progress(f"{options.jobs} jobs in a row, {min(AT_ONCE, options.jobs)} at once")
            yield from (*measure_more_jobs(place, options.jobs), "")
    print_progress(f"{options.nodes} nodes with peers")
    source_bytes = yield from data_nodes.format_table(options.nodes, files / "few")
    yield f"\n{time.monotonic() - start:.0f} s\n"
    yield load.last(
        f"dir_vs_rsync={find_median_ratio(small, 'rsync -a', OURS):.2f}"
        f" tree_vs_tar={find_median_ratio(small, 'tar, untar', OURS):.2f}"
        f" n{options.nodes}_src_bytes={source_bytes:.3f}"
        f" epoch_vs_shared={find_median_ratio(read, 'shared path', 'EROFS'):.2f}"
    )


def _format_results(options: argparse.Namespace, bytes_of: Mapping[str, int]) -> Iterator[str]:
    yield (
        f"{options.files} files of {SMALLEST // KIB} to {LARGEST // KIB} KiB,"
        f" {bytes_of['small'] / GIB:.2f} GiB; {LARGE if options.large else 0} files of"
        f" {options.large} MiB, {bytes_of['large'] / GIB:.2f} GiB"
    )
    yield (
        f"{options.latency} ms for each lookup, stat, open and read, {options.mbyte:g} MB/s;"
        f" {os.cpu_count()} processors; medians of {options.rounds}\n"
    )


def _make_small_tree(files: Path, count: int) -> None:
    """The tree `few`: some of the small files once more."""
    for file in sorted((files / "small").rglob("*.bin"))[:count]:
        other = files / "few" / file.relative_to(files / "small")
        other.parent.mkdir(parents=True, exist_ok=True)
        os.link(file, other)
    for path in ((files / "few"), *(files / "few").rglob("*")):
        os.chown(path, ALICE.uid, ALICE.gid)


def main() -> int:
    return print_in_memory(run_bench(_read_options(), MEMORY))


def _read_options() -> argparse.Namespace:
    parser = busy.BenchOptions("data", __doc__, "9 minutes; --files 20000: 13")
    parser.add_argument("--files", type=int, default=12_000, help="small ones")
    parser.add_argument("--large", type=int, default=16, help="MiB of each large file; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.5, help="ms")
    parser.add_argument("--mbyte", type=float, default=500.0, help="what the source gives, MB/s")
    parser.add_argument("--jobs", type=int, default=100, help="in a row, on a quarter; 0: none")
    parser.add_argument("--nodes", type=int, default=8, help="with peers, on a quarter")
    return parser.begin()


if __name__ == "__main__":
    sys.exit(main())
