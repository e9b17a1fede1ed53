"""The table behind bench/copy. In a mount namespace of its own; nothing of it is left behind.

Source and target are two file systems on two loop devices (O_DIRECT to their files, so that the
host's page cache does not stand in for a disk). Every time is that of a child from its fork to the
point where the bytes are durable: the rivals are followed by an fsync, as forestage does one.
The limit is fio's: writing alone with a warm source, reading and writing at once with a cold one.
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
from pathlib import Path
from typing import NamedTuple

from copy_once import copy_once

from forestage.config import Config, Engine
from forestage.units import format_size, parse_size

ROOM = 512 * 1024 * 1024  # bytes beside the file, for the file system itself
OURS = "forestage chunks"
PLAIN = "  without digest"
# Huge pages for fio's buffers, as ours are: large requests reach the disk whole.
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
FIO = "fio --name=limit --bs=16M --direct=1 --ioengine=libaio --iodepth=4 --output-format=json"


class Run(NamedTuple):
    """One process: seconds, CPU seconds, those of them outside the kernel, peak memory in bytes."""

    wall: float
    cpu: float
    user: float
    memory: int


class Place(NamedTuple):
    """A mounted pair of file systems."""

    source: Path
    target: Path


def rivals(place: Place) -> dict[str, Callable[[], None]]:
    """What a forked child does: a copy as a stager does it, which is forked from its hook too."""
    source, target = str(place.source / "image"), str(place.target / "image")

    def durable(*argv: str) -> Callable[[], None]:
        shell = f"{shlex.join(argv)} && exec sync {shlex.quote(target)}"
        return lambda: os.execvp("sh", ["sh", "-c", shell])

    def ours(engine: Engine, digest: bool) -> Callable[[], None]:
        config = Config(engine=engine, digest=digest)
        return lambda: copy_once(config, source, place.target / "part")

    return {
        OURS: ours("chunks", True),
        PLAIN: ours("chunks", False),
        "forestage rsync": ours("rsync", True),
        "  without digest ": ours("rsync", False),
        "rsync -avSH": durable("rsync", "-avSH", "--quiet", source, target),
        "cp": durable("cp", source, target),
        "dd bs=16M": durable("dd", f"if={source}", f"of={target}", "bs=16M", "status=none"),
    }


def timed(work: Callable[[], None]) -> Run:
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
    return Run(wall, cpu, usage.ru_utime, usage.ru_maxrss * 1024)


def prepare(place: Place, warm: bool) -> None:
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


def limit(place: Place, size: int, warm: bool) -> Run:
    """fio's time for the same bytes on the same devices."""
    prepare(place, warm)
    write = f"--rw=write --filename={place.target / 'image'} --size={size} --end_fsync=1"
    read = f"--name=read --rw=read --filename={place.source / 'image'} --size={size}"
    argv = shlex.split(f"{FIO} {write}" + ("" if warm else f" {read} --bs=16M --direct=1"))
    env = {**os.environ, **HUGE}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    jobs = json.loads(done.stdout)["jobs"]
    slowest = max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in jobs)
    return Run(slowest / 1000, 0.0, 0.0, 0)


@contextlib.contextmanager
def mounted(kind: str, size: int, folder: Path) -> Iterator[Place]:
    loops = []
    place = Place(folder / f"{kind}-source", folder / f"{kind}-target")
    try:
        for point in place:
            file = point.with_suffix(".img")
            with file.open("wb") as disk:
                os.posix_fallocate(disk.fileno(), 0, size + ROOM)
            make = ["mkfs.ext4", "-q", "-m", "0"] if kind == "ext4" else ["mkfs.xfs", "-q"]
            subprocess.run([*make, file], check=True)
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


def fill(place: Place, size: int) -> None:
    """Bytes that no disk and no program can make smaller."""
    cipher = "openssl enc -aes-128-ctr -K 00 -iv 00 -in /dev/zero 2>/dev/null"
    command = f"{cipher} | head -c {size} > {place.source / 'image'}"
    subprocess.run(["sh", "-c", command], check=True)


def measure(kind: str, size: int, rounds: int, folder: Path) -> dict[tuple[str, str], list[Run]]:
    found: dict[tuple[str, str], list[Run]] = {}
    with mounted(kind, size, folder) as place:
        fill(place, size)
        for number in range(rounds):
            for warm in (True, False):
                state = f"{kind} {'warm' if warm else 'cold'}"
                for name, work in rivals(place).items():
                    prepare(place, warm)
                    found.setdefault((state, name), []).append(timed(work))
                    if sys.stderr.isatty():
                        done = f"\r{state} {number + 1}/{rounds} {name:24}"
                        print(done, end="", file=sys.stderr)
                found.setdefault((state, "fio limit"), []).append(limit(place, size, warm))
    return found


def median(runs: list[Run]) -> Run:
    return Run(*(statistics.median(values) for values in zip(*runs, strict=True)))


def main(size_text: str = "4GiB", rounds: str = "3") -> None:
    size = parse_size(size_text)
    found: dict[tuple[str, str], list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/var/tmp") as folder:
        for kind in ("ext4", "xfs"):
            found |= measure(kind, size, int(rounds), Path(folder))
    middle = {key: median(runs) for key, runs in found.items()}
    report(middle, size, int(rounds))


def report(middle: dict[tuple[str, str], Run], size: int, rounds: int) -> None:
    states = list(dict.fromkeys(state for state, _ in middle))
    names = list(dict.fromkeys(name for _, name in middle))
    print(f"\r\n{format_size(size)}, median of {rounds}; GiB/s until durable")
    print(f"{'':20}" + "".join(f"{state:>12}" for state in states))
    for name in names:
        rates = (size / middle[state, name].wall / 2**30 for state in states)
        print(f"{name:20}" + "".join(f"{rate:12.2f}" for rate in rates))
    print("\nCPU seconds / peak MiB (largest process)")
    for name in names[:-1]:
        cells = (middle[state, name] for state in states)
        print(f"{name:20}" + "".join(f"{c.cpu:7.2f}/{c.memory / 2**20:4.0f}" for c in cells))

    # Whoever holds Python's global lock burns user time, so that is the most it can be held.
    held = max(middle[state, PLAIN].user / middle[state, PLAIN].wall for state in states)
    print(f"\nPython's global lock was held for {held:.0%} of a copy without digest, at most")

    def ratio(rival: str, among: list[str]) -> float:
        return min(middle[state, rival].wall / middle[state, OURS].wall for state in among)

    best = {
        kind: max(
            middle[state, "rsync -avSH"].wall / middle[state, "fio limit"].wall
            for state in states
            if state.endswith(kind)
        )
        for kind in ("warm", "cold")
    }
    print(
        "\nat the disk's limit vs_rsync would be at most"
        f" {best['warm']:.2f} warm, {best['cold']:.2f} cold"
    )
    warm = [state for state in states if state.endswith("warm")]
    print(f"\nworst of all states; vs_cp: warm only (cold too: {ratio('cp', states):.2f})")
    print(
        f"vs_rsync={ratio('rsync -avSH', states):.2f} vs_cp={ratio('cp', warm):.2f}"
        f" of_limit={ratio('fio limit', states):.2f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
