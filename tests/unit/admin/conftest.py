"""What the tests of the commands share: a node of their own."""

from pathlib import Path

import pytest

from commands import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
