from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fixtures import as_root, me, no_waits_for_the_disk, site  # noqa: F401  (fixtures)


@pytest.fixture
def terminal() -> Iterator[None]:
    """What is printed is as wide, and times are those, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setenv("TZ", "UTC")
        patch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
        time.tzset()
        yield
    time.tzset()
