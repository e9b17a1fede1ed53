"""Several pytest processes, the lanes, that share the tests: `tests/lanes.py [FOLDER]`, as ./test.

Each takes what no other has taken yet. What is shared out are groups: the tests of one file, or
those of them that are on the same cluster. Clusters mostly wait, so there are more lanes than
processors: some begin with clusters, the others with what computes, and then with what is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
LANES = "FORESTAGE_TEST_LANES"  # how many, if not what suits this machine
TAKEN = "FORESTAGE_TEST_TAKEN"  # a directory that the lanes have in common
CLUSTERS_FIRST = "FORESTAGE_TEST_CLUSTERS_FIRST"  # set: this lane begins with those
# These take longest; what begins last should be over soon.
LONGEST = ["peers", "job_waits", "load", "step_waits", "suites", "benches", "step_sees", "sweep"]
LONGEST += ["inline", "processes", "linters", "source_hangs", "stager_killed"]
# A test that hangs fails after its own time (pyproject.toml); this is for a lane that hangs.
LIMIT, LONG_LIMIT = 40 * 60, 8 * 3600  # seconds
PATIENCE = 60  # seconds for a lane to take its clusters down


# In each lane


def taken_here() -> Path | None:
    return Path(os.environ[TAKEN]) if TAKEN in os.environ else None


def run(session: pytest.Session, taken: Path) -> None:
    """As pytest's own loop, with those tests only that fall to this process."""
    items = _falling_here(in_order(session.items, CLUSTERS_FIRST in os.environ), taken)
    item = next(items, None)
    while item is not None:
        # An item is given what follows, so that what both need is kept.
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


def group_of(item: pytest.Item) -> str:
    """What must stay together: a file, or what is on one cluster of several that it starts."""
    call = getattr(item, "callspec", None)  # only what has parameters has one
    indices = call.indices if call else {}
    alone = indices.get("bench", 0)  # each of these has a cluster of its own
    place = item.path.relative_to(Path(__file__).parent).with_suffix("")
    return f"{'-'.join(place.parts)}-{indices.get('cluster_spec', alone)}"


def in_order(items: Sequence[pytest.Item], clusters_first: bool) -> list[pytest.Item]:
    """The tests on clusters before all others, or after them; the longest first."""

    def rank(item: pytest.Item) -> tuple[bool, int]:
        on_cluster = item.get_closest_marker("slurm") is not None
        places = {name: place for place, name in enumerate(LONGEST)}
        place = places.get(item.path.stem.removeprefix("test_"), len(LONGEST))
        return on_cluster != clusters_first, place

    return sorted(items, key=rank)


def _falling_here(items: Sequence[pytest.Item], taken: Path) -> Iterator[pytest.Item]:
    mine: dict[str, bool] = {}
    for item in items:
        group = group_of(item)
        if group not in mine:
            mine[group] = _take(taken / group)
        if mine[group]:
            yield item


def _take(group: Path) -> bool:
    """Whether it was there to be had: of all processes one only can make the directory."""
    try:
        group.mkdir()
    except FileExistsError:
        return False
    return True


# Around them


class Lane(NamedTuple):
    """A pytest process, and the file in which stands what it says."""

    process: subprocess.Popen[bytes]
    log: Path


def start_all(arguments: Sequence[str]) -> int:
    """Runs the lanes and shows what each has said; the exit code is 0, or that of the worst."""
    import flaky  # not above: in the lanes it is a plugin, which pytest wants to import itself

    count = int(os.environ.get(LANES) or 2 * len(os.sched_getaffinity(0)) + 1)
    limit = LONG_LIMIT if "long" in os.environ.get("FORESTAGE_TEST_ALSO", "").split() else LIMIT
    start, before = time.monotonic(), _ticks()
    with tempfile.TemporaryDirectory(prefix="forestage-test-") as folder:
        os.environ.setdefault(flaky.FAILED, f"{folder}/failed")
        (Path(folder) / "taken").mkdir()
        os.environ[TAKEN] = f"{folder}/taken"
        lanes: list[Lane] = []
        # Handled here, they are at their default there, even if whoever began this ignores ^C.
        signal.signal(signal.SIGINT, _interrupted)
        signal.signal(signal.SIGTERM, _interrupted)
        try:
            for number in range(count):
                lanes.append(_start(arguments, Path(folder), number))
            codes = [_end(lane, start + limit) for lane in lanes]
        except KeyboardInterrupt:
            for lane in lanes:
                lane.process.send_signal(signal.SIGINT)
            for lane in lanes:
                _end(lane, time.monotonic() + PATIENCE)
            return 130
        for number, lane in enumerate(lanes):
            print(f"--- lane {number + 1}\n{lane.log.read_text()}" if number else "", end="")
        busy, ticks = (now - then for now, then in zip(_ticks(), before, strict=True))
        seconds = time.monotonic() - start
        print(f"{count} lanes, {seconds:.0f} s, processors {busy / max(1, ticks):.0%} busy")
        for name in flaky.names(Path(os.environ[flaky.FAILED])):
            print(f"failed: {name}")
    # A lane may be left without tests; where all are, there were none.
    bad = [code for code in codes if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return max(bad, default=min(codes))


def _interrupted(*_: object) -> None:
    """Once: a second signal would cut the lanes' way down short, and leave clusters behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _start(arguments: Sequence[str], folder: Path, number: int) -> Lane:
    """The first lane is shown as it runs; what the others say is kept until all have ended.

    A session of its own: what is sent to a whole process group reaches a lane once, from here.
    Where this process is killed, the kernel ends the lanes.
    """
    log = folder / f"{number}.log"
    environment = os.environ | ({CLUSTERS_FIRST: "1"} if number % 5 < 3 else {})
    tied = ["setpriv", "--pdeathsig", "INT"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*tied, sys.executable, "-m", "pytest", *arguments],
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=file if number else None,
            stderr=subprocess.STDOUT if number else None,
            start_new_session=True,
        )
    return Lane(process, log)


def _end(lane: Lane, until: float) -> int:
    """Its exit code, as a shell has it. After `until` it is ended, which stderr shows."""
    for stop in (lane.process.terminate, lane.process.kill):
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = lane.process.wait(max(0.0, until - time.monotonic()))
            return code if code >= 0 else 128 - code
        print(f"a lane has not ended in time: {lane.log.read_text()[-2000:]}", file=sys.stderr)
        stop()
        until = time.monotonic() + PATIENCE
    return 128 - lane.process.wait()


def _ticks() -> tuple[int, int]:
    """Ticks that all processors together were busy, and that have gone by (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


if __name__ == "__main__":
    sys.exit(start_all(sys.argv[1:]))
