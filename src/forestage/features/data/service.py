"""What the peer service gives of data: a look at a directory, to other nodes of the same job."""

from __future__ import annotations

import re
from typing import BinaryIO

from forestage.cache.layout import open_copy
from forestage.features.contexts import PeerServiceFacts, ServiceRoute

# The session is for the look; its list of files is asked for by the same session.
PATH = re.compile(r"/v1/look/(?P<job>[1-9][0-9]{0,18})/(?P<name>(?P<key>[0-9a-f]{32})(?:\.files)?)")


def routes() -> tuple[ServiceRoute, ...]:
    """Return the one of looks."""
    return (ServiceRoute(PATH, _open_scan_file),)


def _open_scan_file(facts: PeerServiceFacts, found: re.Match[str]) -> BinaryIO:
    return open_copy(facts.cache.looks / found["job"] / found["name"])
