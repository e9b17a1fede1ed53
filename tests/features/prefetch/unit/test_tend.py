"""When prefetch is a part of the minute's work."""

from __future__ import annotations

from pathlib import Path

from forestage.clock import Clock
from forestage.config import Config
from forestage.config.keys import PrefetchSection
from forestage.features.contexts import TendFacts
from forestage.features.prefetch import tend
from forestage.paths import NodePaths


def test_tend_runs_prefetch_as_an_idle_part_only_with_a_configured_host(tmp_path: Path) -> None:
    config = Config(prefetch=PrefetchSection(host="ctl1"))
    for apart in (False, True):
        (found,) = tend.each_minute(TendFacts(NodePaths(tmp_path), Clock(), config, apart))
        assert (found.name, found.is_idle, bool(found.limit)) == ("prefetch", True, True)
    for other in (Config(), None):
        assert [*tend.each_minute(TendFacts(NodePaths(tmp_path), Clock(), other, False))] == []
