"""The parts of the minute's work: which, in which order, how often, and what becomes of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from forestage.clock import Clock
from forestage.commands import tend
from forestage.commands.tend import TendPart, TendPartEnd
from forestage.config import Config
from forestage.errors import Failed
from forestage.features.contexts import TendFacts
from forestage.paths import NodePaths
from forestage.system import lock
from forestage.system.run import RunningProcess


class Moved(Clock):
    """A wall clock that is moved by hand; no other time passes."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def wall(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return 0.0


class Process:
    """One that ends when it is told, with a code; or when it is killed, unless it `hangs`."""

    pid = 4242

    def __init__(self, ends: int | None = 0, hangs: bool = False) -> None:
        self.exit_code, self.hangs, self.killed = ends, hangs, False

    def wait(self, timeout: float) -> bool:
        return self.exit_code is not None

    def kill(self) -> None:
        self.killed = True
        if not self.hangs:
            self.exit_code = -9


class Run:
    """Runs of given parts, and the processes that they start."""

    def __init__(self, root: Path, *parts: TendPart) -> None:
        self.places, self.clock, self.parts = NodePaths(root), Moved(), parts
        self.processes: dict[str, Process | Exception] = {}
        self.started: list[str] = []
        self.locks: list[int] = []

    def __call__(self) -> list[TendPartEnd]:
        return [*tend.run_due_parts(self.places, self.clock, iter(self.parts), self.start)]

    def start(self, part: TendPart, held: int | None) -> RunningProcess:
        self.started.append(part.name)
        found = self.processes.setdefault(part.name, Process())
        if isinstance(found, Exception):
            raise found
        # As a process that inherits it does.
        if found.exit_code is None and held is not None:
            self.locks.append(os.dup(held))
        return cast("RunningProcess", found)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> list[TendPart]:
    """The parts of a feature."""
    added: list[TendPart] = []
    monkeypatch.setattr(tend, "load_doors", lambda door: iter([lambda facts: iter(added)]))
    return added


def names(root: Path, config: Config | None, apart: bool = False) -> list[str]:
    facts = TendFacts(NodePaths(root), Clock(), config, apart)
    return [one.name for one in tend.list_parts(facts, False)]


def test_tend_parts_begin_with_room_and_include_those_of_features(
    tmp_path: Path, adding: list[TendPart]
) -> None:
    assert names(tmp_path, Config()) == ["room", "sweep", "proofs"]
    adding += [TendPart("orbit", ()), TendPart("launch", (), 10.0), TendPart("land", (), 10.0)]
    whole = ["room", "launch", "land", "orbit", "sweep", "proofs"]
    assert names(tmp_path, Config()) == whole, "what the run waits for is before what it does not"


def test_node_without_jobs_or_configuration_runs_only_the_features_tend_parts(
    tmp_path: Path, adding: list[TendPart]
) -> None:
    adding.append(TendPart("launch", (), 10.0))
    assert names(tmp_path, Config(), apart=True) == ["launch"]
    assert names(tmp_path, None) == ["launch"]


def test_tend_runs_only_sweep_and_proofs_with_idle_io_and_without_a_limit(
    tmp_path: Path, adding: list[TendPart]
) -> None:
    facts = TendFacts(NodePaths(tmp_path), Clock(), Config(), False)
    parts = [*tend.list_parts(facts, False)]
    assert [one.name for one in parts if one.is_idle] == ["sweep", "proofs"]
    assert [one.name for one in parts if not one.limit] == ["sweep", "proofs"]


def test_tend_part_with_an_interval_runs_every_tenth_minute_and_after_a_clock_jump(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, TendPart("room", ()), TendPart("sweep", (), every=tend.SWEEP_INTERVAL))
    for _ in range(30):
        run()
        run.clock.at += 61  # a bit more than a minute
    assert (run.started.count("room"), run.started.count("sweep")) == (30, 3)
    for step in (-1e6, 1e6):
        run.clock.at += step
        run()
        run()
    assert run.started.count("sweep") == 5, "a time that has yet to come keeps nothing away"


def test_tend_reads_entries_at_each_run_while_the_disk_is_doubted(tmp_path: Path) -> None:
    for is_doubted, every in ((True, 0.0), (False, tend.SWEEP_INTERVAL)):
        facts = TendFacts(NodePaths(tmp_path), Clock(), Config(), False)
        parts = tend.list_parts(facts, is_doubted)
        assert [one.every for one in parts if one.name == "proofs"] == [every]


@pytest.mark.parametrize("hangs", [True, False])
def test_tend_part_at_its_time_limit_is_killed_and_left_out_while_it_hangs(
    tmp_path: Path, hangs: bool
) -> None:
    run = Run(tmp_path, TendPart("room", (), 20.0), TendPart("metrics", (), 10.0))
    process = run.processes["room"] = Process(None, hangs)
    room, metrics = run()
    assert process.killed
    assert (room.state, metrics.state) == ("hangs" if hangs else "cut", "ended")
    assert (room.has_failed, "4242" in tend.format_part_end(room)) == (True, True)
    room, metrics = run()
    assert (room.state, metrics.state) == ("left out", "ended")
    assert run.started.count("room") == 1
    os.close(run.locks.pop())  # the kernel lets it go
    run.processes["room"] = Process()
    assert [one.state for one in run()] == ["ended", "ended"]


def test_tend_does_not_wait_for_a_part_without_a_time_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, TendPart("sweep", ()), TendPart("proofs", ()))
    process = run.processes["sweep"] = Process(None)
    assert [one.state for one in run()] == ["begun", "begun"]
    assert not process.killed
    assert not lock.is_free(tend.part_lock_path(run.places, "sweep"))
    assert lock.is_free(tend.part_lock_path(run.places, "proofs"))
    os.close(run.locks.pop())


def test_interrupted_tend_kills_the_part_that_it_waits_for(tmp_path: Path) -> None:
    class Interrupted(Process):
        def wait(self, timeout: float) -> bool:
            raise KeyboardInterrupt

    run = Run(tmp_path, TendPart("metrics", (), 10.0))
    process = run.processes["metrics"] = Interrupted(None)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert process.killed
    os.close(run.locks.pop())


def test_tend_part_that_cannot_be_started_fails_and_the_next_part_runs(tmp_path: Path) -> None:
    run = Run(tmp_path, TendPart("prefetch", (), 10.0), TendPart("sweep", ()))
    run.processes["prefetch"] = Failed("program", "ionice is not installed")
    prefetch, sweep = run()
    assert (prefetch.has_failed, sweep.state) == (True, "begun")
    assert "ionice" in tend.format_part_end(prefetch)


def test_tend_part_without_a_lock_runs_with_a_time_limit_and_fails_without_a_limit(
    tmp_path: Path,
) -> None:
    """One without could run beside another for hours."""
    done = tmp_path / "none/done"
    parts = TendPart("room", (), 20.0), TendPart("warm", (), 15.0, done=done), TendPart("sweep", ())
    run = Run(tmp_path, *parts)
    run.places.run.parent.mkdir()
    run.places.run.touch()
    room, warm, sweep = run()
    assert (room.state, warm.state, sweep.state) == ("ended", "ended", "failed")
    assert run.started == ["room", "warm"]


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        (TendPartEnd("room", "ended", 0), False),
        (TendPartEnd("room", "ended", 12), False),  # no cache yet
        (TendPartEnd("room", "ended", 5), True),
        (TendPartEnd("warm", "ended", 1, harmless=(0, 1)), False),  # not yet here
        (TendPartEnd("warm", "ended", 4, harmless=(0, 1)), True),
        (TendPartEnd("sweep", "left out"), False),
        (TendPartEnd("room", "ended", -9), True),
    ],
)
def test_tend_part_has_failed_if_it_did_not_do_its_work(end: TendPartEnd, failed: bool) -> None:
    assert end.has_failed == failed
