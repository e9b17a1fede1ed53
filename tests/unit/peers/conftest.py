"""Here nodes are found as the program finds them, whatever tests of services ran before."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def found_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the places of `peering.find_at`, which names nodes of one host."""
    if peering := sys.modules.get("peering"):
        monkeypatch.setattr(peering, "_places", {})
