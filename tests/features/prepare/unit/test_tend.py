"""When a boot's images are a part of the minute's work."""

from __future__ import annotations

from pathlib import Path

from forestage.clock import Clock
from forestage.config import Config
from forestage.features.contexts import TendFacts
from forestage.features.prepare import tend
from forestage.paths import NodePaths


def test_tend_stages_warm_at_boot_until_all_images_are_cached(tmp_path: Path) -> None:
    places, config = NodePaths(tmp_path), Config(warm_at_boot=("/a",))
    warmed = tend.warmed_sign_path(places)
    (found,) = tend.each_minute(TendFacts(places, Clock(), config, False))
    assert (found.done, found.is_idle, bool(found.limit)) == (warmed, False, True)
    warmed.parent.mkdir(parents=True)
    warmed.touch()
    assert [*tend.each_minute(TendFacts(places, Clock(), config, False))] == []


def test_tend_stages_nothing_without_warm_at_boot_or_on_a_host_that_is_no_node(
    tmp_path: Path,
) -> None:
    for config, apart in ((Config(), False), (None, False), (Config(warm_at_boot=("/a",)), True)):
        assert [*tend.each_minute(TendFacts(NodePaths(tmp_path), Clock(), config, apart))] == []
