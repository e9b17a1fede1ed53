"""What the question among nodes finds in a large cluster, beside no memory and an oracle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[4] / "bench"))

from copies_model import CopiesCase, CopiesSimulation

JOBS = 1000


def test_simulated_copies_mostly_find_a_node_with_the_image_despite_failing_nodes() -> None:
    found = CopiesSimulation(CopiesCase(jobs=JOBS)).run()
    assert found.oracle > 2000
    assert found.gain >= 0.7
    assert CopiesSimulation(CopiesCase(jobs=JOBS, remembers=False)).run().gain < 0.25, (
        "else nothing is shown"
    )


@pytest.mark.parametrize("nodes", [200, 10_000])
def test_simulated_copy_asks_three_nodes_in_a_cluster_of_any_size(nodes: int) -> None:
    assert CopiesSimulation(CopiesCase(nodes=nodes, jobs=100)).run().questions == 3.0


def test_simulated_wide_job_does_not_displace_earlier_requesters_of_its_key() -> None:
    found = CopiesSimulation(CopiesCase(jobs=400, width=32, kept=20, restarts=0.0, liars=0)).run()
    assert found.oracle > 100
    assert found.gain >= 0.7
