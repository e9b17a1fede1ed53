"""When the list of nodes is a part of the minute's work."""

from __future__ import annotations

from pathlib import Path

from forestage.clock import Clock
from forestage.commands.tend import SWEEP_INTERVAL
from forestage.config import Config
from forestage.config.keys import PeersSection
from forestage.features.contexts import TendFacts
from forestage.features.peers import tend
from forestage.paths import NodePaths


def test_tend_runs_the_node_list_query_as_a_separate_part_with_peers_on(tmp_path: Path) -> None:
    config = Config(peers=PeersSection(enabled=True))
    (found,) = tend.each_minute(TendFacts(NodePaths(tmp_path), Clock(), config, False))
    assert found.command == ("sweep", "--quiet", "--only", "nodes")
    assert (found.limit, found.every) == (0.0, SWEEP_INTERVAL), "Slurm may not answer for long"
    off = Config(peers=PeersSection(enabled=False))
    for other, apart in ((off, False), (None, False), (config, True)):
        assert [*tend.each_minute(TendFacts(NodePaths(tmp_path), Clock(), other, apart))] == []
