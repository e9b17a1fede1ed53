"""Random lives of a node, hundreds of events a second: see inline.py for what is not real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from inline import Killed, Mishap, expecting, without_processes
from lab import Lab
from lives import few, many
from model import owner_of
from played import Ended
from promises import After, Work

from forestage import trace
from forestage.cache.evict import evict_keys
from machine import Machine, names, numbers, seeds, several
from node import Node

STAGER = ("claimed", "reserved", "copied", "checked", "published")


class Inline(Machine):
    """Hooks run one after the other, and within each other at the trace points."""

    sizes = st.sampled_from((70_000, 0, 1, 4095, 200_000, 400_000))
    rooms = ("1M", "600K", "2M")
    mishap: Mishap | None = None
    powerless = False  # soon

    def run(self, work: Work, after: After) -> Ended:
        mishap, self.mishap = self.mishap, None
        with expecting(mishap):
            return work()

    @rule(number=numbers, wanted=several)
    def job_starts(self, number: int, wanted: list[str]) -> None:
        self.prolog(number, wanted)

    @rule(number=numbers, name=names)
    def step_starts(self, number: int, name: str) -> None:
        self.step(number, name)

    @rule(number=numbers)
    def job_ends(self, number: int) -> None:
        self.epilog(number)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 4))
    def a_running_job_ends(self, which: int) -> None:
        self.epilog(sorted(self.jobs)[which % len(self.jobs)])

    @rule(number=numbers, name=names, point=st.sampled_from(STAGER))
    def stager_dies(self, number: int, name: str, point: str) -> None:
        def die() -> None:
            raise Killed

        self.mishap = Mishap(point, 1, die)
        self.prolog(number, [name])
        self.mishap = None

    @rule(
        data=st.data(),
        number=numbers,
        name=names,
        point=st.sampled_from((*STAGER, "chunk", "looking")),
        nth=st.integers(1, 2),
        in_place=st.booleans(),
    )
    def source_changes_meanwhile(
        self, data: st.DataObject, number: int, name: str, point: str, nth: int, in_place: bool
    ) -> None:
        # Not here yet, so that there is a copy for it to meet.
        fresh = self.version(data.draw(seeds), 70_000, owner_of(number), 0o644)
        self.change_source(name, fresh, False)
        to = self.next_of(data, name)
        self.mishap = Mishap(point, nth, lambda: self.change_source(name, to, in_place))
        self.prolog(number, [name])
        self.mishap = None
        self.check_entries()

    @rule(number=numbers, name=names, other=numbers, point=st.sampled_from(STAGER))
    def another_job_ends_meanwhile(self, number: int, name: str, other: int, point: str) -> None:
        other += 5 * (other == number)  # for a job's own Epilog see below
        self.mishap = Mishap(point, 1, lambda: self.epilog(other))
        self.prolog(number, [name])
        self.mishap = None

    @rule(
        number=numbers,
        both=st.permutations(("one", "two", "three")),
        other=numbers,
        point=st.sampled_from(STAGER),
    )
    def another_job_starts_meanwhile(
        self, number: int, both: list[str], other: int, point: str
    ) -> None:
        self.mishap = Mishap(point, 1, lambda: self.prolog(other, both[1:]))
        self.prolog(number, both[:1])
        self.mishap = None

    @rule(number=numbers, name=names, point=st.sampled_from((*STAGER, "looking")))
    def all_is_evicted_meanwhile(self, number: int, name: str, point: str) -> None:
        def evict() -> None:
            evict_keys(self.node.cache, self.node.leases, self.node.entries())

        self.mishap = Mishap(point, 1, evict)
        self.prolog(number, [name])
        self.mishap = None

    @rule(number=numbers, name=names, point=st.sampled_from((*STAGER, "looking")))
    def staging_is_switched_off_meanwhile(self, number: int, name: str, point: str) -> None:
        self.mishap = Mishap(point, 1, lambda: self.lab.switch("file"))
        self.prolog(number, [name])
        self.mishap = None

    @rule(
        number=numbers,
        name=names,
        seed=seeds,
        point=st.sampled_from(("reserved", "copied", "checked")),
    )
    def power_fails_during_a_copy(self, number: int, name: str, seed: int, point: str) -> None:
        self.change_source(name, self.version(seed, 70_000, owner_of(number), 0o644), False)

        def die() -> None:
            trace.listener = Mishap(point, 1, die)  # so that the next stager dies as well
            raise Killed

        self.mishap, self.powerless = Mishap(point, 1, die), True
        self.prolog(number, [name])
        self.mishap, self.powerless = None, False
        self.reboot("bytes", 0)
        self.prolog(number, [name])
        self.check_entries()

    def calm(self) -> bool:
        return super().calm() and not self.powerless


@pytest.fixture
def machine(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Inline]]:
    without_processes(monkeypatch)
    with Lab.opened(node, tmp_path, threads=1) as lab:
        yield type("OnThisNode", (Inline,), {"lab": lab})


@pytest.mark.parametrize("examples", [11, pytest.param(34, marks=pytest.mark.ci)])
def test_random_order_of_events_breaks_no_invariant_of_the_node(
    machine: type[Inline], examples: int
) -> None:
    few(machine, examples, steps=30)


def test_lease_use_dropped_by_an_epilog_during_the_next_prolog_is_not_restored(
    machine: type[Inline],
) -> None:
    life = machine()
    life.prolog(4, ["one"])
    life.mishap = Mishap("copied", 1, lambda: life.epilog(4))
    life.prolog(4, ["two"])
    lease = life.node.lease(4)
    assert lease is not None
    assert {use.path for use in lease.uses} == {str(life.lab.sources["two"].path)}


@pytest.mark.long
def test_many_random_orders_of_events_break_no_invariant_of_the_node(machine: type[Inline]) -> None:
    many(machine, steps=60, minutes=3, batch=25)
