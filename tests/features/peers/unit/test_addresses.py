"""Where a copy finds a node: by the site's pattern, at NodeAddr, or by its name."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.config import ServiceAddress
from forestage.config.keys import PeersSection
from forestage.features.peers import addresses, connection, node_list
from forestage.features.peers.addresses import NodeAddresses
from forestage.features.peers.connection import PeerConnection, PeerRequestError, ResponseDeadline
from forestage.features.peers.node_list import PeerNodeList
from forestage.paths import NodePaths

LISTED = {"n1": "10.77.0.2", "n2": "", "n3": "host3"}


@pytest.mark.parametrize(
    ("pattern", "node", "expected"),
    [
        ("{node}", "n1", ServiceAddress("10.77.0.2", 7717, "n1")),
        ("{node}", "n2", ServiceAddress("n2", 7717)),
        ("{node}", "n3", ServiceAddress("host3", 7717, "n3")),
        ("{node}", "n9", ServiceAddress("n9", 7717)),
        ("{node}:80", "n1", ServiceAddress("10.77.0.2", 80, "n1")),
        ("{node}-ib", "n1", ServiceAddress("n1-ib", 7717, "10.77.0.2")),
        ("{node}-ib", "n2", ServiceAddress("n2-ib", 7717)),
        ("{node}-ib:80", "n9", ServiceAddress("n9-ib", 80)),
    ],
)
def test_peer_address_is_nodeaddr_or_follows_the_sites_pattern(
    pattern: str, node: str, expected: ServiceAddress
) -> None:
    assert NodeAddresses(PeersSection(address=pattern), LISTED).node_address(node) == expected


def test_peer_addresses_come_from_the_node_list_or_are_node_names_without_a_list(
    tmp_path: Path,
) -> None:
    places = NodePaths(tmp_path)
    assert addresses.load_addresses(PeersSection(), places).node_address("n1") == ServiceAddress(
        "n1", 7717
    )
    node_list.write_list(places, PeerNodeList(time.time(), {"n1": "10.77.0.2"}))
    assert addresses.load_addresses(PeersSection(), places).node_address("n1").host == "10.77.0.2"
    places.nodes.unlink()
    places.nodes.parent.rmdir()
    places.nodes.parent.touch()
    assert addresses.load_addresses(PeersSection(), places).node_address("n1") == ServiceAddress(
        "n1", 7717
    )


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a service at 127.0.0.1 that accepts connections; no name is known to be bad yet."""
    monkeypatch.setattr(connection, "_unresolved_hosts", set())
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def opens(address: ServiceAddress) -> None:
    line = PeerConnection(address)
    line.ensure_open(ResponseDeadline(0.0, time.monotonic() + 60, lambda: False))
    line.close()


def test_peer_with_an_unresolvable_name_is_connected_at_nodeaddr(port: int) -> None:
    opens(ServiceAddress("no-such-name.invalid", port, "127.0.0.1"))


def test_peer_with_an_unresolvable_name_and_no_nodeaddr_is_refused(port: int) -> None:
    with pytest.raises(PeerRequestError, match=r"refused: no-such-name\.invalid"):
        opens(ServiceAddress("no-such-name.invalid", port))


def test_hanging_name_service_is_waited_for_once_per_peer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second connection does not ask it, and an address that is known never does."""
    real, asked, end = socket.getaddrinfo, [], threading.Event()

    def getaddrinfo(host: str, *rest: object, **more: object) -> object:
        if host == "n1-ib":
            asked.append(host)
            end.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "")
        return real(host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.5)
    try:
        for _ in range(2):
            opens(ServiceAddress("n1-ib", port, "127.0.0.1"))
        assert asked == ["n1-ib"]
        opens(NodeAddresses(PeersSection(port=port), {"n1-ib": "127.0.0.1"}).node_address("n1-ib"))
        assert asked == ["n1-ib"]
    finally:
        end.set()
