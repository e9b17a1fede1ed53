"""What the peer service gives of prefetch: root's record of what the queue names, on its host."""

from __future__ import annotations

import re
from pathlib import Path

from forestage.features.contexts import Route, ServiceFacts
from forestage.paths import Places
from forestage.system import records

PATH = re.compile("/v1/(?P<key>expected)")  # expected.KEY


def routes() -> tuple[Route, ...]:
    """Return the one of the list."""
    return (Route(PATH, _read),)


def locate_list(places: Places) -> Path:
    """Return where the list is. Pure."""
    return places.run / "expected.json"


def _read(facts: ServiceFacts, _: re.Match[str]) -> bytes:
    return records.read(locate_list(facts.places))
