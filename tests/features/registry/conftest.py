"""What the suites of registry share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures import REFERENCE
from forestage.features.registry.step_image import RegistryRequest
from forestage.features.registry.waiting_tasks import WaitingTasks
from forestage.slurm.hints import Request


@pytest.fixture
def asked() -> RegistryRequest:
    return RegistryRequest(
        Request(REFERENCE, "option"), 3, batch=False, container="", timeout="540"
    )


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[WaitingTasks]:
    with WaitingTasks(tmp_path / "sock", 60.0) as made:
        yield made
