"""The table behind bench/window: four loaders, two epochs, a source of so many bytes a second.

The source is ext4 on a loop device, whose file is in memory and whose rate the kernel limits for
all readers together. Each loader has every fourth file; it reads one from its first to its last
byte and then computes for a time, so that all of them together want DEMAND of what the source
gives. What they wait for is the time from asking for a path to its last byte. What was read is
dropped from the page cache: the data set stands for one that is larger than the memory. A window
has room for a fifth of it. Round by round the shared path and the window begin in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / name) for name in ("src/window", "tests/window", "tests/slurm", "tests")]

import busy  # noqa: E402
import start_source  # noqa: E402
from copiers import usage  # noqa: E402
from forestage_window import window  # noqa: E402

MIB = 1 << 20
FILES, LOADERS, EPOCHS = 64, 4, 2
SHARE = 5  # times the room
AHEAD = 2  # files, for each loader: four loaders with three each fill the room
RATE = 16 * MIB  # bytes a second
DEMAND = 0.8  # of the rate
MEMORY = Path("/mnt")  # there on every Linux; covered in this program's own namespace only


class LoaderRun(NamedTuple):
    waited: float  # seconds, all loaders together
    seconds: float
    read: float  # from the source, in data sets
    peak: float  # of the room


def run_loader(paths: Sequence[str], room: int, directory: str, pause: float) -> float:
    """A loader, in a process of its own. Returns the seconds that it waited."""
    shards = window(paths, room, ahead=AHEAD, directory=directory) if room else paths
    waited = 0.0
    for _ in range(EPOCHS):
        asked = time.perf_counter()
        for path in shards:
            with open(path, "rb", buffering=0) as file:
                while file.read(MIB):
                    pass
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            waited += time.perf_counter() - asked
            time.sleep(pause)
            asked = time.perf_counter()
    return waited


def run_loaders(
    files: Sequence[Path], room: int, disk: start_source.LimitedDisk, pause: float
) -> LoaderRun:
    with tempfile.TemporaryDirectory(prefix="forestage-bench-") as directory:
        before, start = disk.given(), time.perf_counter()
        loaders = [
            subprocess.Popen(
                [sys.executable, __file__, "--load"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(LOADERS)
        ]
        peak = _PeakUsage(Path(directory))
        for number, loader in enumerate(loaders):
            assert loader.stdin
            mine = [str(path) for path in files[number::LOADERS]]
            print(json.dumps([mine, room, directory, pause]), file=loader.stdin, flush=True)
        answers = [loader.communicate()[0] for loader in loaders]
        if not all(answers):
            raise SystemExit("bench/window: a loader failed")
        waited = sum(map(float, answers))
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in files)
        read = (disk.given() - before) / size
        most = peak.end()
        return LoaderRun(waited, seconds, read, most / room if room else 0.0)


class _PeakUsage:
    """The most bytes that were below a directory, or unlinked and open, at any look."""

    def __init__(self, directory: Path) -> None:
        self.bytes, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, args=[directory])
        self.thread.start()

    def _watch(self, directory: Path) -> None:
        while not self.done.wait(0.02):
            self.bytes = max(self.bytes, usage(directory))

    def end(self) -> int:
        self.done.set()
        self.thread.join()
        return self.bytes


def format_table(mib: float, rounds: int) -> Iterator[str]:
    busied = busy.MachineLoad()
    subprocess.run(["mount", "-t", "tmpfs", "memory", MEMORY], check=True)
    tree, size = MEMORY / "tree", int(mib * MIB)
    tree.mkdir()
    for number in range(FILES):
        (tree / f"shard-{number:03}.tar").write_bytes(os.urandom(size))
    room = FILES * size // SHARE
    pause = LOADERS * size / (RATE * DEMAND)
    yield f"{FILES} files of {mib} MiB, room for {room / size:.1f}, {RATE // MIB} MiB/s"
    yield "| way | waited s | seconds | read x | peak x |"
    yield "|:--" + "|--:" * 4 + "|"
    pairs = []
    with start_source.mount_here(tree, MEMORY) as (disk, shown):
        files = sorted(shown.glob("*.tar"))
        disk.slow(RATE)
        for number in range(rounds):
            got: dict[int, LoaderRun] = {}
            for take in (0, room) if number % 2 else (room, 0):
                Path("/proc/sys/vm/drop_caches").write_text("1")
                got[take] = run_loaders(files, take, disk, pause)
                yield "| {} | {:.2f} | {:.1f} | {:.2f} | {:.2f} |".format(
                    "window" if take else "shared", *got[take]
                )
            pairs.append((got[0], got[room]))
    stalls = statistics.median(shared.waited / ours.waited for shared, ours in pairs)
    faster = statistics.median(shared.seconds / ours.seconds for shared, ours in pairs)
    read = statistics.median(ours.read / shared.read for shared, ours in pairs)
    peak = max(ours.peak for _, ours in pairs)
    yield busied.last(
        f"stalls_vs_shared={stalls:.1f} speedup={faster:.2f} src_bytes={read:.2f} peak={peak:.3f}"
    )


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--load"]:
        print(run_loader(*json.loads(sys.stdin.readline())))
        return
    options = busy.BenchOptions("window", __doc__, "4 minutes")
    options.add_argument("mib", nargs="?", type=float, default=2.0, help="of each file")
    options.add_argument("rounds", nargs="?", type=int, default=3)
    given = options.begin()
    for line in format_table(given.mib, given.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
