"""What `prefetch:` may say, and what it means."""

from __future__ import annotations

import re

import pytest
import yaml

from forestage.config import KEYS, REMOVED_KEYS, Config, ServiceAddress
from forestage.config.keys import PeersSection, PrefetchSection
from forestage.features.prefetch.prefetch_host import find_host

HOST = KEYS["prefetch.host"]


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (["n1"], "expected null or a node's or a host's name"),
        ("n 1", "expected null or a node's or a host's name"),
        ("\ud800", "expected null or a node's or a host's name"),
        ("n1:\n", "expected null or a port from 1 to 65535"),
        ("a:0", "expected null or a port from 1 to 65535"),
    ],
)
def test_host_that_cannot_be_one_is_refused(raw: object, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        HOST.read(raw)


def test_host_of_digits_is_shown_as_it_is_read() -> None:
    assert HOST.read(yaml.safe_load(HOST.show(HOST.read("0")))) == "0"


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("ctl1", ServiceAddress("ctl1", 7000)),
        ("ctl1.site:80", ServiceAddress("ctl1.site", 80)),
        (None, None),
    ],
)
def test_host_is_found_as_it_is_written(host: str | None, found: ServiceAddress | None) -> None:
    peers = PeersSection(address="{node}-ib:7718", port=7000)
    assert find_host(Config(peers=peers, prefetch=PrefetchSection(host=host))) == found


def test_host_is_never_a_key_that_is_ignored() -> None:
    """Whoever takes it away has to say what becomes of what it excluded."""
    assert "prefetch.host" in set(KEYS) - set(REMOVED_KEYS)
