"""When the metrics are a part of the minute's work."""

from __future__ import annotations

from pathlib import Path

from forestage.clock import Clock
from forestage.config import Config
from forestage.config.keys import MetricsSection
from forestage.features.contexts import TendFacts
from forestage.features.metrics import tend
from forestage.paths import NodePaths


def names(root: Path, config: Config | None, apart: bool = False) -> list[str]:
    facts = TendFacts(NodePaths(root), Clock(), config, apart)
    return [one.name for one in tend.each_minute(facts)]


def test_tend_writes_metrics_unless_textfile_is_null_or_the_host_is_no_node(tmp_path: Path) -> None:
    assert names(tmp_path, Config()) == ["metrics"]
    assert names(tmp_path, Config(), apart=True) == []
    assert names(tmp_path, Config(metrics=MetricsSection(textfile=None))) == []


def test_tend_writes_metrics_even_without_a_usable_configuration(tmp_path: Path) -> None:
    assert names(tmp_path, None) == ["metrics"]
