"""Where a node is found: what is written leads there, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.address import Address, parse
from forestage.config import Peering


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("n1", "n1", 7717),
        ("n1:80", "n1", 80),
        ("n1.cluster:65535", "n1.cluster", 65535),
        ("10.0.0.1", "10.0.0.1", 7717),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("::1", "::1", 7717),
        ("fe80::1%ib0", "fe80::1%ib0", 7717),
        ("[::1]", "::1", 7717),
        ("[::1]:80", "::1", 80),
    ],
)
def test_what_is_written_is_found(text: str, host: str, port: int) -> None:
    assert parse(text, 7717) == Address(host, port)


@pytest.mark.parametrize(
    "text", ["", ":80", "n1:", "n1:0", "n1:65536", "n1:x", "n1:-1", "n1:١", "[::1", "[]", "[::1]80"]
)
def test_what_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse(text, 7717)


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        found = parse(text, 5)
    except ValueError:
        return
    assert found.host
    assert 0 < found.port < 65536


def test_a_node_has_its_own_address_or_that_of_the_pattern() -> None:
    peers = Peering(address="{node}-ib:7000", addresses={"n2": "10.0.0.2", "n3": "n1:7003"})
    found = [peers.of(node) for node in ("n1", "n2", "n3")]
    assert found == [Address("n1-ib", 7000), Address("10.0.0.2", 7717), Address("n1", 7003)]
