"""Random lives of a node with real processes, killed, stopped or given errors at any effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab
from lives import Machine, few_of_processes, many

from node import Node
from processes import Processes


@pytest.fixture
def machine(node: Node, tmp_path: Path) -> Iterator[Machine]:
    with Lab.opened(node, tmp_path, threads=2) as lab:
        yield type("OnThisNode", (Processes,), {"lab": lab, "folder": tmp_path})


@pytest.mark.parametrize("examples", [4, pytest.param(11, marks=pytest.mark.ci)])
def test_random_order_of_events_with_processes_breaks_no_invariant_of_the_node(
    machine: Machine, examples: int
) -> None:
    few_of_processes(machine, examples, steps=15)


@pytest.mark.long
def test_many_random_orders_of_events_with_processes_break_no_invariant_of_the_node(
    machine: Machine,
) -> None:
    many(machine, steps=30, minutes=5)
