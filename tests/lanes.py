"""Several pytest processes, the lanes, that share the tests: `tests/lanes.py [FOLDER]`, as ./test.

A lane runs one folder of tests after another, each in a process of its own: a process that has
collected all tests is three times as large, and each fork of a test costs as much more. First it
takes a folder in which no other lane is, then it helps with those that are not over. What they
share out there are groups: the tests of one file, or those of them that are on the same cluster.
Clusters mostly wait, so there are more lanes than processors: some begin with clusters, the others
with what computes, and then with what is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
LANES = "FORESTAGE_TEST_LANES"  # how many, if not what suits this machine
TAKEN = "FORESTAGE_TEST_TAKEN"  # a directory that the lanes have in common
BUILT = "FORESTAGE_TEST_BUILT"  # another: the clusters' plugins (slurm/cluster.py)
OUTCOMES = "outcomes"  # a file: how many tests passed, failed, were skipped in each process
TIMES = "times"  # a file: the seconds that tests took, with what they share, and their names
LONG, MOST = 2.0, 30  # seconds of a test that is noted there; so many are shown
CLUSTERS = TESTS / "slurm"
# These take longest, of the folders and within them; what begins last should be over soon.
FOLDERS = [".", "faults", "state", "hooks", "features/peers/hooks", "features/data/hooks"]
FOLDERS += ["features/registry/registry", "spank", "window"]
FOLDERS += [f"processes/{name}" for name in ("system", "stage", "commands", "sources", "check")]
LONGEST = [
    "delete_feature",
    "registry",
    "data",
    "peers",
    "job_waits",
    "load",
    "step_sees",
    "through",
    "step_waits",
]
LONGEST += ["suites", "benches", "linters", "shares", "job_dir_filled", "through_server", "inline"]
LONGEST += ["stager_killed", "window_processes"]
# A test that hangs fails after its own time (pyproject.toml); this is for a lane that hangs.
LIMIT, LONG_LIMIT = 40 * 60, 8 * 3600  # seconds
PATIENCE = 60  # seconds for a lane to take its clusters down


# In each lane


def taken_here() -> Path | None:
    return Path(os.environ[TAKEN]) if TAKEN in os.environ else None


def run(session: pytest.Session, taken: Path) -> None:
    """As pytest's own loop, with those tests only that fall to this process."""
    items = _falling_here(in_order(session.items), taken)
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
    place = item.path.relative_to(TESTS).with_suffix("")
    return f"{'-'.join(place.parts)}-{indices.get('cluster_spec', alone)}"


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The longest first."""
    return sorted(items, key=lambda item: _place_in(LONGEST, item.path.stem.removeprefix("test_")))


def _place_in(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


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


def note(stats: Mapping[str, Sequence[object]], taken: Path) -> None:
    """Adds what became of this process' tests to what the lanes have in common."""
    passed, failed, errors, skipped = (
        len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")
    )
    # One write of a line: several processes append to the same file.
    with (taken.parent / OUTCOMES).open("ab", buffering=0) as file:
        file.write(b"%d %d %d\n" % (passed, failed + errors, skipped))
    seconds: Counter[str] = Counter()
    for report in (one for reports in stats.values() for one in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    lines = [f"{took:.1f} {name}\n" for name, took in seconds.items() if took >= LONG]
    with (taken.parent / TIMES).open("ab", buffering=0) as file:
        file.write("".join(lines).encode())


# Around them


def total(outcomes: Path) -> str:
    """What became of the tests of all processes."""
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    sums = (
        sum(column)
        for column in zip((0, 0, 0), *(map(int, line.split()) for line in lines), strict=True)
    )
    return "{} passed, {} failed, {} skipped".format(*sums)


def slowest(times: Path) -> list[str]:
    """The tests that took longest, with their seconds."""
    lines = times.read_text().splitlines() if times.exists() else []
    return sorted(lines, key=lambda line: -float(line.split()[0]))[:MOST]


def folders(top: Path) -> list[Path]:
    """Those that have tests of their own, the longest first."""
    found = {file.parent for file in top.rglob("test_*.py")}
    return sorted(found, key=lambda one: (_place_in(FOLDERS, os.path.relpath(one, TESTS)), one))


def next_folder(left: Sequence[Path], begun: Collection[Path], clusters_first: bool) -> Path | None:
    """Which of the folders that are not over a lane goes to: one where nobody is, if there is one.

    All lanes that begin with clusters share theirs; the others go there last.
    """

    def rank(folder: Path) -> tuple[bool, bool]:
        return (folder == CLUSTERS) != clusters_first, folder in begun

    return min(left, key=rank, default=None)


class Lane:
    """Runs a pytest process at a time. What all of them say stands in one file."""

    def __init__(self, number: int, logs: Path) -> None:
        self.number = number
        self.log = logs / f"{number}.log"
        self.log.touch()
        self.clusters_first = number % 5 < 3
        self.folder: Path | None = None  # where it is
        self.process: subprocess.Popen[bytes]

    def start(self, folder: Path) -> None:
        """The first lane is shown as it runs; what the others say is kept until all have ended.

        A session of its own: what is sent to a whole process group reaches a lane once, from here.
        Where this process is killed, the kernel ends the lanes.
        """
        self.folder = folder
        tied = ["setpriv", "--pdeathsig", "INT"]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [*tied, sys.executable, "-m", "pytest", *sorted(folder.glob("test_*.py"))],
                cwd=TESTS.parent,
                stdin=subprocess.DEVNULL,
                stdout=file if self.number else None,
                stderr=subprocess.STDOUT if self.number else None,
                start_new_session=True,
            )

    def end(self, until: float) -> int:
        """Its exit code, as a shell has it. After `until` it is ended, which stderr shows."""
        self.folder = None
        for stop in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(max(0.0, until - time.monotonic()))
                return code if code >= 0 else 128 - code
            said = self.log.read_text()[-2000:]
            print(f"a lane has not ended in time: {said}", file=sys.stderr)
            stop()
            until = time.monotonic() + PATIENCE
        return 128 - self.process.wait()


def start_all(top: Path) -> int:
    """Runs the lanes and shows what each has said; the exit code is 0, or that of the worst."""
    import flaky  # not above: in the lanes it is a plugin, which pytest wants to import itself

    count = int(os.environ.get(LANES) or 2 * len(os.sched_getaffinity(0)) + 1)
    limit = LONG_LIMIT if "long" in os.environ.get("FORESTAGE_TEST_ALSO", "").split() else LIMIT
    start, before = time.monotonic(), _ticks()
    with tempfile.TemporaryDirectory(prefix="forestage-test-") as folder:
        os.environ.setdefault(flaky.FAILED, f"{folder}/failed")
        (Path(folder) / "taken").mkdir()
        os.environ[TAKEN] = f"{folder}/taken"
        (Path(folder) / "built").mkdir()
        os.environ[BUILT] = f"{folder}/built"
        lanes = [Lane(number, Path(folder)) for number in range(count)]
        # Handled here, they are at their default there, even if whoever began this ignores ^C.
        signal.signal(signal.SIGINT, _interrupted)
        signal.signal(signal.SIGTERM, _interrupted)
        try:
            codes = _run(lanes, folders(top), start + limit)
        except KeyboardInterrupt:
            running = [lane for lane in lanes if lane.folder]
            for lane in running:
                lane.process.send_signal(signal.SIGINT)
            for lane in running:
                lane.end(time.monotonic() + PATIENCE)
            return 130
        for lane in lanes[1:]:
            print(f"--- lane {lane.number + 1}\n{lane.log.read_text()}", end="")
        busy, ticks = (now - then for now, then in zip(_ticks(), before, strict=True))
        seconds = time.monotonic() - start
        print(f"{count} lanes, {seconds:.0f} s, processors {busy / max(1, ticks):.0%} busy")
        for line in slowest(Path(folder) / TIMES):
            print(f"slow: {line}")
        for name in flaky.names(Path(os.environ[flaky.FAILED])):
            print(f"failed: {name}")
        print(total(Path(folder) / OUTCOMES))
    # Another lane may have taken all of a folder; where there are no tests at all, that is bad.
    nothing = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return max((code for code in codes if code != nothing), default=nothing)


def _run(lanes: Sequence[Lane], left: list[Path], until: float) -> list[int]:
    """Has the lanes run all folders, until they are over; the exit codes of all that was run."""
    begun: set[Path] = set()
    codes = []
    while True:
        for lane in lanes:
            folder = next_folder(left, begun, lane.clusters_first)
            if lane.folder is None and folder and time.monotonic() < until:
                begun.add(folder)
                lane.start(folder)
        running = [lane for lane in lanes if lane.folder]
        if not running:
            return codes
        for lane in _first_to_end(running, until):
            # Whoever ends has found nothing in its folder that nobody had taken.
            left[:] = [folder for folder in left if folder != lane.folder]
            codes.append(lane.end(until))


def _first_to_end(running: Sequence[Lane], until: float) -> list[Lane]:
    """Waits for it. All that still run, if none ends in time."""
    with contextlib.ExitStack() as stack:
        lanes = {}
        for lane in running:
            process = os.pidfd_open(lane.process.pid)
            stack.callback(os.close, process)
            lanes[process] = lane
        ended, _, _ = select.select(lanes, [], [], max(0.0, until - time.monotonic()))
        return [lanes[process] for process in ended] or list(running)


def _interrupted(*_: object) -> None:
    """Once: a second signal would cut the lanes' way down short, and leave clusters behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _ticks() -> tuple[int, int]:
    """Ticks that all processors together were busy, and that have gone by (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


if __name__ == "__main__":
    sys.exit(start_all(Path(*(sys.argv[1:] or [TESTS])).resolve()))
