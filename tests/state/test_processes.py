"""Random lives of a node with real processes, killed, stopped or given errors at any effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab
from lives import few_of_processes, many
from processes import Processes

from node import Node


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[Lab]:
    config = {"low_watermark": "60%", "threads": 2, "user_messages": "none"}
    with Lab.opened(node, tmp_path, **config) as lab:
        yield lab


def machine(lab: Lab, tmp_path: Path) -> type[Processes]:
    return type("OnThisNode", (Processes,), {"lab": lab, "folder": tmp_path})


def test_no_order_of_events_breaks_a_promise(lab: Lab, tmp_path: Path) -> None:
    few_of_processes(machine(lab, tmp_path), examples=11, steps=15)


@pytest.mark.long
def test_no_order_of_events_whatever_breaks_a_promise(lab: Lab, tmp_path: Path) -> None:
    many(machine(lab, tmp_path), lab, steps=30, minutes=5)
