"""What the question among nodes finds in a large cluster, beside no memory and an oracle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[4] / "bench"))

from copies_model import Case, World

JOBS = 1000


def test_most_copies_find_a_warm_node_though_nodes_are_dead_restart_evict_and_lie() -> None:
    found = World(Case(jobs=JOBS)).run()
    assert found.oracle > 2000
    assert found.gain >= 0.7
    assert World(Case(jobs=JOBS, remembers=False)).run().gain < 0.25, "else nothing is shown"


@pytest.mark.parametrize("nodes", [200, 10_000])
def test_questions_do_not_grow_with_the_cluster(nodes: int) -> None:
    assert World(Case(nodes=nodes, jobs=100)).run().questions == 3.0


def test_wide_job_does_not_have_earlier_ones_forgotten_while_its_nodes_ask() -> None:
    found = World(Case(jobs=400, width=32, kept=20, restarts=0.0, liars=0)).run()
    assert found.oracle > 100
    assert found.gain >= 0.7
