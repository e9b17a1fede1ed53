"""When a boot's images are a part of the minute's work."""

from __future__ import annotations

from pathlib import Path

from forestage.clock import Clock
from forestage.config import Config
from forestage.features.contexts import TendFacts
from forestage.features.prepare import tend
from forestage.paths import NodePaths


def test_copies_of_a_boot_are_a_part_until_all_images_were_here(tmp_path: Path) -> None:
    places, config = NodePaths(tmp_path), Config(warm_at_boot=("/a",))
    warmed = tend.warmed_sign(places)
    (found,) = tend.each_minute(TendFacts(places, Clock(), config, False))
    assert (found.done, found.is_idle, bool(found.limit)) == (warmed, False, True)
    warmed.parent.mkdir(parents=True)
    warmed.touch()
    assert [*tend.each_minute(TendFacts(places, Clock(), config, False))] == []


def test_node_without_images_of_a_boot_or_without_jobs_has_no_part(tmp_path: Path) -> None:
    for config, apart in ((Config(), False), (None, False), (Config(warm_at_boot=("/a",)), True)):
        assert [*tend.each_minute(TendFacts(NodePaths(tmp_path), Clock(), config, apart))] == []
