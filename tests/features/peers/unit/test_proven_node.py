"""The note that another node has our key."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.peers import proven_node
from forestage.features.peers.proven_node import ProvenNode
from forestage.paths import NodePaths


def test_proven_node_record_holds_the_last_proven_node(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    assert proven_node.find_proven_node(places) is None
    proven_node.record_proven_node(places, "n2", 5.0)
    proven_node.record_proven_node(places, "n3", 6.0)
    assert proven_node.find_proven_node(places) == ProvenNode("n3", 6.0)


@pytest.mark.parametrize("text", ["", "n2", "{}", '{"node": 5, "at": 1}'])
def test_damaged_proven_node_record_is_none(tmp_path: Path, text: str) -> None:
    places = NodePaths(tmp_path)
    places.proven_node.parent.mkdir(parents=True)
    places.proven_node.write_text(text)
    assert proven_node.find_proven_node(places) is None


def test_proven_node_record_that_cannot_be_written_is_skipped(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    places.run.parent.mkdir(parents=True)
    places.run.touch()
    proven_node.record_proven_node(places, "n2", 5.0)
    assert proven_node.find_proven_node(places) is None
