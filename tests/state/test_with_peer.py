"""The same with a second node that has some of the images, whole or rotten, or is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doomed import Beside, Doom, kill
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from lab import Lab
from lives import Machine, few_of_processes, many
from machine import names, numbers, seeds
from neighbour import NODELIST, Neighbour
from processes import MIB, Processes, nths

from node import ALICE, Node


class WithPeer(Processes):
    """The images have several chunks, as a peer gives nothing less."""

    sizes = st.sampled_from((2 * MIB + 1, 3 * MIB, MIB + 1, 200_000))
    rooms = ("16M", "8M", "24M")
    neighbour: Neighbour
    nodelist = NODELIST

    def __init__(self) -> None:
        self.neighbour.forgets()
        super().__init__()

    def bystanders(self) -> set[int]:
        return super().bystanders() | self.neighbour.pids()

    @initialize(rotten=st.booleans())
    def neighbour_helps_at_first(self, rotten: bool) -> None:
        self.neighbour.serves()
        self.neighbour_has_what_a_job_wants("one", 1, 7, rotten, 10**6)

    @rule(name=names, number=numbers, seed=seeds, rotten=st.booleans(), victim=nths)
    def neighbour_has_what_a_job_wants(
        self, name: str, number: int, seed: int, rotten: bool, victim: int
    ) -> None:
        self.change_source(name, self.version(seed, 3 * MIB - 1, ALICE, 0o644), False)
        work = self.neighbour.staging(self.lab.sources[name].path, 1)
        assert Beside(self.folder, work, None).ended() is not None
        if rotten:
            self.lab.tally["rotten"] += self.neighbour.rots()
        self.act("prolog", number, [name], Doom("stager", victim, kill))

    @rule(lives=st.booleans())
    def neighbour_dies_or_comes_back(self, lives: bool) -> None:
        self.neighbour.serves() if lives else self.neighbour.dies()

    def set_digest(self, digest: bool) -> None:
        """No rule here: peers need digests."""

    def teardown(self) -> None:
        copies = self.node.outcomes("stager")
        self.lab.tally["from_peers"] += sum(one.from_peers > 0 for one in copies)
        super().teardown()


@pytest.fixture
def machine(node: Node, tmp_path: Path) -> Iterator[Machine]:
    neighbour = Neighbour(node, node.places.root.parent)
    neighbour.serves()
    with Lab.opened(node, tmp_path, threads=2, peers=neighbour.peers()) as lab:
        facts = {"lab": lab, "folder": tmp_path, "neighbour": neighbour}
        yield type("OnThisNode", (WithPeer,), facts)
    neighbour.dies()


def test_no_order_of_events_breaks_a_promise(machine: Machine) -> None:
    few_of_processes(machine, examples=4, steps=10)


@pytest.mark.long
def test_no_order_of_events_whatever_breaks_a_promise(machine: Machine) -> None:
    many(machine, steps=30, minutes=3)
    assert machine.lab.tally["from_peers"] > 0
    assert machine.lab.tally["rotten"] > 0
