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
def test_prefetch_host_key_refuses_an_invalid_host_or_port(raw: object, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        HOST.parse_value(raw)


def test_prefetch_host_key_of_digits_round_trips_through_yaml() -> None:
    assert HOST.parse_value(yaml.safe_load(HOST.format_value(HOST.parse_value("0")))) == "0"


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("ctl1", ServiceAddress("ctl1", 7000)),
        ("ctl1.site:80", ServiceAddress("ctl1.site", 80)),
        (None, None),
    ],
)
def test_prefetch_host_address_uses_its_port_or_the_peers_port(
    host: str | None, found: ServiceAddress | None
) -> None:
    peers = PeersSection(address="{node}-ib:7718", port=7000)
    assert find_host(Config(peers=peers, prefetch=PrefetchSection(host=host))) == found


def test_prefetch_host_is_not_among_the_removed_keys() -> None:
    """Whoever takes it away has to say what becomes of what it excluded."""
    assert "prefetch.host" in set(KEYS) - set(REMOVED_KEYS)
