"""What the metrics say of peers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forestage.commands.event_counters import EventTally
from forestage.config import Config
from forestage.config.keys import PeersSection
from forestage.features.contexts import MetricsFacts
from forestage.features.peers import metrics, silent_nodes
from forestage.paths import NodePaths


@pytest.mark.parametrize(
    ("enabled", "has_service", "said"),
    [
        (None, True, "on"),
        (None, False, "down"),
        (True, False, "down"),
        (False, True, "off"),
    ],
)
def test_peers_metric_is_down_if_only_the_service_is_missing(
    enabled: bool | None, has_service: bool, said: str
) -> None:
    assert metrics.describe_peers(Config(peers=PeersSection(enabled=enabled)), has_service) == said


def test_metrics_count_peers_that_did_not_answer(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)

    def count() -> float:
        facts = MetricsFacts(places, None, None, EventTally(), time.monotonic())
        (silent, *_) = metrics.read_metrics(facts).families
        assert silent.name == "peers_unanswered"
        return silent.value

    assert count() == 0
    for name in ("n7", "n8"):
        silent_nodes.record_silence(places, name, time.monotonic())
    assert count() == 2
