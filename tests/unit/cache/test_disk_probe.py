"""What is said of a cache's disk that gave no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.cache import disk_probe
from forestage.cache.layout import Cache
from forestage.errors import Declined
from forestage.paths import NodePaths
from forestage.system import probe
from forestage.system.probe import HangReport


@pytest.mark.parametrize("refuse", [disk_probe.check_readable, disk_probe.check_writable])
@pytest.mark.parametrize(
    ("seconds", "left", "reason"),
    [
        (0.003, 0.01, "deadline"),  # something else has taken the hook's time
        (0.003, 60.0, "cache-hangs"),
        (0.9, 60.0, "cache-hangs"),
        (0.2, 1.0, "cache-hangs"),
        (30.0, 0.01, "cache-hangs"),  # known from another hook
    ],
)
def test_disk_that_had_little_time_to_answer_is_declined_with_deadline_not_cache_hangs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    refuse: Callable[[NodePaths, Cache, float], None],
    seconds: float,
    left: float,
    reason: str,
) -> None:
    monkeypatch.setattr(probe, "find_hang", lambda *_: HangReport(disk_probe.READS, seconds))
    with pytest.raises(Declined) as refused:
        refuse(NodePaths(tmp_path), Cache(tmp_path), left)
    assert refused.value.reason == reason
