"""What the peer service gives of prefetch: root's record of what the queue names, on its host."""

from __future__ import annotations

import re
from pathlib import Path

from forestage.features.contexts import PeerServiceFacts, ServiceRoute
from forestage.paths import NodePaths
from forestage.system import records

PATH = re.compile("/v1/(?P<key>expected)")  # expected_list.KEY


def routes() -> tuple[ServiceRoute, ...]:
    """Return the one of the list."""
    return (ServiceRoute(PATH, _read_list),)


def locate_list(places: NodePaths) -> Path:
    """Return where the list is. Pure."""
    return places.run / "expected.json"


def _read_list(facts: PeerServiceFacts, _: re.Match[str]) -> bytes:
    return records.read_raw(locate_list(facts.places))
