"""The table behind bench/copy. In a mount namespace of its own; nothing of it is left behind.

Source and target are two file systems on two loop devices (O_DIRECT to their files, so that the
host's page cache does not stand in for a disk). Every time is that of a child from its fork to the
point where the bytes are durable: the rivals are followed by an fsync, as forestage does one.
The limit is fio's: writing alone with a warm source, reading and writing at once with a cold one.
Its time begins with the first request and ends with its fsync. Ours also has the start and end of a
process, the child that looks at the source as its user, the space that is reserved, the part's
other files and the digests: some 15 ms, whatever the size.

Both disks are written once before anything is measured: the first write to a block of a file that
is sparse or only reserved takes up to three times as long, and whoever comes first would pay for
that. For the same reason every second round has the reverse order. Ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import busy
from copy_once import copy_once

from forestage.config import Config, EngineName
from forestage.units import format_size, parse_size

ROOM = 512 * 1024 * 1024  # bytes beside the file, for the file system itself
OURS = "forestage chunks"
LIMIT = "fio limit"
RATIOS = {"of_limit": LIMIT, "vs_cp": "cp", "vs_rsync": "rsync -avSH"}  # to the rival's time
# Huge pages for fio's buffers, as ours are: large requests reach the disk whole.
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Neither of them discards: that would make holes in what was just written.
MAKE = {"ext4": "mkfs.ext4 -q -m 0 -E nodiscard", "xfs": "mkfs.xfs -q -K"}
FIO = "fio --name=limit --bs=16M --direct=1 --ioengine=libaio --iodepth=4 --output-format=json"


class ProcessCost(NamedTuple):
    """One process: seconds, CPU seconds, those of them outside the kernel, peak memory in bytes."""

    wall: float
    cpu: float
    user: float
    memory: int


Found: TypeAlias = dict[
    tuple[str, str], list[ProcessCost]
]  # of each state and name, round by round


class FileSystemPair(NamedTuple):
    """A mounted pair of file systems."""

    source: Path
    target: Path


def list_rivals(place: FileSystemPair) -> dict[str, Callable[[], None]]:
    """What a forked child does: a copy as a stager does it, which is forked from its hook too."""
    source, target = str(place.source / "image"), str(place.target / "image")

    def durable(*argv: str) -> Callable[[], None]:
        shell = f"{shlex.join(argv)} && exec sync {shlex.quote(target)}"
        return lambda: os.execvp("sh", ["sh", "-c", shell])

    def ours(engine: EngineName) -> Callable[[], None]:
        return lambda: copy_once(Config(engine=engine), source, place.target / "part")

    return {
        OURS: ours("chunks"),
        "cp": durable("cp", source, target),
        "dd bs=16M": durable("dd", f"if={source}", f"of={target}", "bs=16M", "status=none"),
        "rsync -avSH": durable("rsync", "-avSH", "--quiet", source, target),
        "forestage rsync": ours("rsync"),
    }


def measure_process(work: Callable[[], None]) -> ProcessCost:
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit("bench/copy: a copy failed")
    wall = time.perf_counter() - start
    cpu = usage.ru_utime + usage.ru_stime
    return ProcessCost(wall, cpu, usage.ru_utime, usage.ru_maxrss * 1024)


def prepare_round(place: FileSystemPair, warm: bool) -> None:
    """Empties the target and brings the source's cache into the wanted state."""
    (place.target / "image").unlink(missing_ok=True)
    shutil.rmtree(place.target / "part", ignore_errors=True)
    for point in place:
        subprocess.run(["sync", "--file-system", point], check=True)
    with (place.source / "image").open("rb") as source:
        # Of this file only: whatever else the machine has cached is of use to others.
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if warm:
        subprocess.run(["cat", place.source / "image"], stdout=subprocess.DEVNULL, check=True)
    # A virtual machine may have given free memory back to its host. Whoever writes through the
    # page cache next would pay for getting it again, so it is got here, for all alike: enough for
    # both files.
    size = 2 * (place.source / "image").stat().st_size
    mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def measure_fio(place: FileSystemPair, size: int, warm: bool) -> ProcessCost:
    """fio's time for the same bytes on the same devices."""
    write = f"--rw=write --filename={place.target / 'image'} --size={size} --end_fsync=1"
    read = f"--name=read --rw=read --filename={place.source / 'image'} --size={size}"
    argv = shlex.split(f"{FIO} {write}" + ("" if warm else f" {read} --bs=16M --direct=1"))
    env = {**os.environ, **HUGE}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    jobs = json.loads(done.stdout)["jobs"]
    slowest = max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in jobs)
    return ProcessCost(slowest / 1000, 0.0, 0.0, 0)


@contextlib.contextmanager
def mount_pair(kind: str, size: int, folder: Path) -> Iterator[FileSystemPair]:
    loops = []
    place = FileSystemPair(folder / f"{kind}-source", folder / f"{kind}-target")
    try:
        for point in place:
            file = point.with_suffix(".img")
            write = f"dd if=/dev/zero of={file} bs=16M count={size + ROOM} iflag=count_bytes"
            subprocess.run([*write.split(), "oflag=direct", "status=none"], check=True)
            subprocess.run([*MAKE[kind].split(), file], check=True)
            find = ["losetup", "--find", "--show", "--direct-io=on", file]
            loops.append(subprocess.run(find, capture_output=True, text=True, check=True).stdout)
            point.mkdir()
            subprocess.run(["mount", loops[-1].strip(), point], check=True)
        yield place
    finally:
        for point in place:
            subprocess.run(["umount", point], check=False, stderr=subprocess.DEVNULL)
        for loop in loops:
            subprocess.run(["losetup", "--detach", loop.strip()], check=False)


def write_random_file(place: FileSystemPair, size: int) -> None:
    """Bytes that no disk and no program can make smaller."""
    cipher = "openssl enc -aes-128-ctr -K 00 -iv 00 -in /dev/zero 2>/dev/null"
    command = f"{cipher} | head -c {size} > {place.source / 'image'}"
    subprocess.run(["sh", "-c", command], check=True)


def measure_rounds(kind: str, size: int, rounds: int, folder: Path) -> Found:
    found: Found = {}
    with mount_pair(kind, size, folder) as place:
        write_random_file(place, size)
        for number in range(rounds):
            for warm in (True, False):
                state = f"{kind} {'warm' if warm else 'cold'}"
                runs = {
                    name: partial(measure_process, work)
                    for name, work in list_rivals(place).items()
                }
                runs = {LIMIT: partial(measure_fio, place, size, warm), **runs}
                for name in runs if number % 2 == 0 else reversed(runs):
                    prepare_round(place, warm)
                    found.setdefault((state, name), []).append(runs[name]())
                    if sys.stderr.isatty():
                        done = f"\r{state} {number + 1}/{rounds} {name:24}"
                        print(done, end="", file=sys.stderr)
    return found


def find_median(runs: list[ProcessCost]) -> ProcessCost:
    return ProcessCost(*(statistics.median(values) for values in zip(*runs, strict=True)))


def main() -> None:
    options = busy.BenchOptions("copy", __doc__, "5 minutes; 4GiB an hour")
    options.add_argument("size", nargs="?", type=parse_size, default="512MiB", help="of the file")
    options.add_argument("rounds", nargs="?", type=int, default=5)
    given, load = options.begin(), busy.MachineLoad()
    size, rounds = given.size, given.rounds
    found: Found = {}
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/var/tmp") as folder:
        for kind in ("ext4", "xfs"):
            found |= measure_rounds(kind, size, rounds, Path(folder))
    print_table(found, size, rounds, load)


def print_table(found: Found, size: int, rounds: int, load: busy.MachineLoad) -> None:
    """Prints the table."""
    middle = {key: find_median(runs) for key, runs in found.items()}
    states = list(dict.fromkeys(state for state, _ in middle))
    names = list(dict.fromkeys(name for _, name in middle))
    print(f"\r\n{format_size(size)}, median of {rounds}; GiB/s until durable")
    print(f"{'':20}" + "".join(f"{state:>12}" for state in states))
    for name in names:
        rates = (size / middle[state, name].wall / 2**30 for state in states)
        print(f"{name:20}" + "".join(f"{rate:12.2f}" for rate in rates))
    print("\nCPU seconds per GiB / peak MiB (largest process)")
    for name in names:
        if name != LIMIT:
            cells = (middle[state, name] for state in states)
            each = (f"{c.cpu / size * 2**30:7.2f}/{c.memory / 2**20:4.0f}" for c in cells)
            print(f"{name:20}" + "".join(each))

    print("\nratios of forestage chunks: median of the rounds (lowest to highest)")
    print(f"{'':12}" + "".join(f"{state:>22}" for state in states))
    for word, rival in RATIOS.items():
        each = (list_ratios(found, state, rival) for state in states)
        cells = (f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in each)
        print(f"{word:12}" + "".join(f"{cell:>22}" for cell in cells))

    def worst(word: str, state: str = "") -> str:
        """The lowest median of these states."""
        among = [one for one in states if one.endswith(state)]
        medians = [statistics.median(list_ratios(found, one, RATIOS[word])) for one in among]
        return f"{word}{'_cold' if state == 'cold' else ''}={min(medians):.2f}"

    print(
        "\nthe worst of ext4 and xfs: vs_rsync warm and cold, vs_cp and of_limit warm; cpu: seconds"
        " per GiB"
    )
    cpu = max(middle[state, OURS].cpu for state in states) / size * 2**30
    warm = f"{worst('vs_rsync')} {worst('vs_cp', 'warm')} {worst('of_limit', 'warm')}"
    cold = f"{worst('vs_cp', 'cold')} {worst('of_limit', 'cold')}"
    print(load.last(f"{warm} {cold} cpu={cpu:.2f}"))


def list_ratios(found: Found, state: str, rival: str) -> list[float]:
    """How many times as long the rival took, in each round."""
    pairs = zip(found[state, rival], found[state, OURS], strict=True)
    return [theirs.wall / ours.wall for theirs, ours in pairs]


if __name__ == "__main__":
    main()
