"""Where the service listens: on what was named, or not at all, and then it says why."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from forestage import listen
from forestage.config import Peering
from forestage.errors import PeerError


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def port() -> Iterator[int]:
    """Bound without listening, by SO_REUSEADDR: we may have it, no other program is given it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("0.0.0.0", 0))
        yield probe.getsockname()[1]


def where(sockets: list[socket.socket]) -> list[tuple[str, int]]:
    return sorted(one.getsockname()[:2] for one in sockets)


def test_both_families_listen_on_all_addresses(opened: list[socket.socket], port: int) -> None:
    opened += listen.sockets(Peering(port=port), "n1")
    assert where(opened) == [("0.0.0.0", port), ("::", port)]


@pytest.mark.parametrize(("name", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_one_address_is_enough(
    opened: list[socket.socket], port: int, name: str, host: str
) -> None:
    opened += listen.sockets(Peering(port=port, listen=name), "n1")
    assert where(opened) == [(host, port)]


def test_the_node_itself_may_be_named(opened: list[socket.socket], port: int) -> None:
    opened += listen.sockets(Peering(port=port, listen="127.0.0.{node}"), "3")
    assert where(opened) == [("127.0.0.3", port)]


def test_an_interface_is_all_its_addresses(opened: list[socket.socket], port: int) -> None:
    opened += listen.sockets(Peering(port=port, listen="lo"), "n1")
    assert where(opened) == [("0.0.0.0", port), ("::", port)]
    device = {one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for one in opened}
    assert {name.rstrip(b"\0") for name in device} == {b"lo"}


def test_the_port_is_that_of_the_nodes_own_address(opened: list[socket.socket], port: int) -> None:
    peers = Peering(listen="127.0.0.1", addresses={"n1": f"127.0.0.1:{port}"})
    opened += listen.sockets(peers, "n1")
    assert where(opened) == [("127.0.0.1", port)]


def test_connections_inherit_their_bounds(opened: list[socket.socket], port: int) -> None:
    opened += listen.sockets(Peering(port=port, listen="127.0.0.1", bandwidth=1 << 20), "n1")
    client = socket.create_connection(("127.0.0.1", port))
    opened[0].setblocking(True)
    server, _ = opened[0].accept()
    opened += [client, server]
    user_timeout = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    pacing = server.getsockopt(socket.SOL_SOCKET, listen.SO_MAX_PACING_RATE)
    assert (user_timeout, pacing) == (listen.USER_TIMEOUT, 1 << 20)


def test_a_port_that_is_taken_is_told_and_nothing_stays_open(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(PeerError) as caught:
            listen.sockets(Peering(port=port), "n1")
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    assert f"port {port} of any address is taken" in str(caught.value)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-name.invalid"])
def test_what_is_not_here_is_told(port: int, name: str) -> None:
    with pytest.raises(PeerError) as caught:
        listen.sockets(Peering(port=port, listen=name), "n1")
    assert "peers.listen" in str(caught.value)


def test_a_kernel_without_ipv6_serves_the_other_family(
    opened: list[socket.socket], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = listen._listening

    def without(family: socket.AddressFamily, *rest: object) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return real(family, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(listen, "_listening", without)
    opened += listen.sockets(Peering(port=port), "n1")
    assert where(opened) == [("0.0.0.0", port)]
