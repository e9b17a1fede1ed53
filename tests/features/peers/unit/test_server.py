"""The service's sockets, and the rate limit of its uploads."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from forestage.cache import disk_errors
from forestage.cache.node import Node
from forestage.config.keys import PeersSection
from forestage.errors import ConfigError, PeerError, SlurmError
from forestage.features.peers import listen_sockets, node_list, server
from forestage.features.peers.auth import KeyFileAuthenticator
from forestage.features.peers.server import UploadRateLimit
from forestage.features.peers.upload_counts import UploadCountWriter
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient


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


class Told(SlurmClient):
    """Slurm as it answers about this node's address, if it does."""

    answer = ""

    def query(self, *words: str, **how: object) -> str:
        if not self.answer:
            raise SlurmError("Unable to contact slurm controller")
        return self.answer


def open_at(
    peers: PeersSection, node: str = "n1", places: NodePaths | None = None, told: Told | None = None
) -> list[socket.socket]:
    """As the service does, without the wait for an interface that is late."""
    left: list[float] = []
    slurm, nowhere = told or Told(""), NodePaths(Path("/nonexistent"))
    return listen_sockets.open_service_sockets(peers, places or nowhere, node, slurm, left.append)


def site(folder: Path, lines: str) -> NodePaths:
    conf = folder / "etc/slurm/slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(lines)
    return NodePaths(folder)


def test_peer_service_listens_at_the_nodes_nodeaddr_by_default(
    opened: list[socket.socket], port: int, tmp_path: Path
) -> None:
    text = "NodeName=DEFAULT CPUs=2\ninclude nodes.conf\nPartitionName=all Nodes=ALL\n"
    places = site(tmp_path, text)
    nodes = tmp_path / "etc/slurm/nodes.conf"
    nodes.write_text("NodeName=n[1-3] NodeAddr=127.0.0.[11-13] State=UNKNOWN\n")
    opened += open_at(PeersSection(port=port), "n2", places)
    assert where(opened) == [("127.0.0.12", port)]


def test_peer_service_without_a_slurm_conf_line_listens_at_the_address_from_slurm(
    opened: list[socket.socket], port: int, tmp_path: Path
) -> None:
    """A cloud's or a dynamic node; then Slurm need not be asked again."""
    lines = "NodeName=DEFAULT State=CLOUD\nNodeName=n[1-3] NodeAddr=127.0.0.9\n"
    places = site(tmp_path, lines + "PartitionName=all Nodes=ALL\n")
    told = Told("")
    told.answer = "127.0.0.14"
    opened += open_at(PeersSection(port=port), "n2", places, told)
    assert where(opened) == [("127.0.0.14", port)]
    node_list.write_list(places, node_list.PeerNodeList(time.time(), {"n3": "127.0.0.15"}))
    opened += open_at(PeersSection(port=port), "n3", places)
    assert ("127.0.0.15", port) in where(opened)


@pytest.mark.parametrize("nodeaddr", ["", " NodeAddr=localhost", " NodeAddr=no-such.invalid"])
def test_peer_service_listens_on_all_addresses_if_nodeaddr_is_loopback_or_unresolvable(
    opened: list[socket.socket],
    port: int,
    tmp_path: Path,
    nodeaddr: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Debian's 127.0.1.1: other nodes are told by DNS where this one is."""
    places = site(tmp_path, f"NodeName=localhost{nodeaddr}\n")
    opened += open_at(PeersSection(port=port), "localhost", places)
    assert where(opened) == [("0.0.0.0", port), ("::", port)]
    assert "peer listens on all addresses" in capfd.readouterr().err


def test_peer_service_with_a_nodeaddr_of_no_interface_raises_config_error(
    port: int, tmp_path: Path
) -> None:
    """NAT: the unit does not start it again, and the line says what to set."""
    places = site(tmp_path, "NodeName=n1 NodeAddr=192.0.2.7\n")
    with pytest.raises(ConfigError) as caught:
        open_at(PeersSection(port=port), "n1", places)
    assert "peers.listen: is null, and other nodes find n1 at 192.0.2.7" in str(caught.value)


def test_peer_service_waits_for_an_address_that_appears_later(
    opened: list[socket.socket], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = site(tmp_path, "NodeName=n1 NodeAddr=192.0.2.7\n")
    real, waited = socket.socket.bind, [0.0]

    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        real(self, ("127.0.0.16", address[1]) if len(waited) > 3 else address)

    monkeypatch.setattr(socket.socket, "bind", bind)
    peers = PeersSection(port=port)
    opened += listen_sockets.open_service_sockets(peers, places, "n1", Told(""), waited.append)
    assert where(opened) == [("127.0.0.16", port)]


def test_peer_service_listens_at_the_address_of_the_sites_pattern(
    opened: list[socket.socket], port: int, tmp_path: Path
) -> None:
    places = site(tmp_path, "NodeName=n1 NodeAddr=127.0.0.11\n")
    opened += open_at(PeersSection(port=port, address="127.0.0.{node}"), "17", places)
    assert where(opened) == [("127.0.0.17", port)]


def test_empty_listen_key_opens_all_ipv4_and_ipv6_addresses(
    opened: list[socket.socket], port: int
) -> None:
    opened += listen_sockets.open_sockets_at(PeersSection(port=port), "n1", "")
    assert where(opened) == [("0.0.0.0", port), ("::", port)]


@pytest.mark.parametrize(
    ("listen", "host"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.{node}", "127.0.0.3")],
)
def test_listen_key_with_an_address_opens_only_that_address(
    opened: list[socket.socket], port: int, listen: str, host: str
) -> None:
    opened += open_at(PeersSection(port=port, listen=listen), "3")
    assert where(opened) == [(host, port)]


def test_listen_key_with_an_interface_binds_to_the_device(
    opened: list[socket.socket], port: int
) -> None:
    opened += open_at(PeersSection(port=port, listen="lo"))
    assert where(opened) == [("0.0.0.0", port), ("::", port)]
    device = {one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for one in opened}
    assert {name.rstrip(b"\0") for name in device} == {b"lo"}


def test_peer_service_listens_on_the_port_of_its_address_pattern(
    opened: list[socket.socket], port: int
) -> None:
    peers = PeersSection(listen="127.0.0.1", address=f"{{node}}:{port}")
    opened += open_at(peers)
    assert where(opened) == [("127.0.0.1", port)]


def test_accepted_peer_connections_inherit_timeout_and_pacing_rate(
    opened: list[socket.socket], port: int
) -> None:
    opened += open_at(PeersSection(port=port, listen="127.0.0.1", bandwidth=1 << 20))
    client = socket.create_connection(("127.0.0.1", port))
    opened[0].setblocking(True)
    accepted, _ = opened[0].accept()
    opened += [client, accepted]
    user_timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    pacing = accepted.getsockopt(socket.SOL_SOCKET, listen_sockets.SO_MAX_PACING_RATE)
    assert (user_timeout, pacing) == (listen_sockets.USER_TIMEOUT, 1 << 20)


def test_taken_port_raises_a_peer_error_and_leaves_no_socket_open(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(PeerError) as caught:
            listen_sockets.open_sockets_at(PeersSection(port=port), "n1", "")
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    assert f"port {port} of any address is taken" in str(caught.value)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-name.invalid"])
def test_unknown_listen_address_raises_an_error_naming_the_key(port: int, name: str) -> None:
    with pytest.raises(PeerError) as caught:
        open_at(PeersSection(port=port, listen=name))
    assert "peers.listen" in str(caught.value)


def test_peer_service_listens_on_ipv4_if_the_kernel_has_no_ipv6(
    opened: list[socket.socket], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket

    def without(family: socket.AddressFamily, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return real(family, *rest)

    monkeypatch.setattr(socket, "socket", without)
    opened += listen_sockets.open_sockets_at(PeersSection(port=port), "n1", "")
    assert where(opened) == [("0.0.0.0", port)]


# --- the bandwidth


class Now:
    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept, without sleeping."""
    seconds: list[float] = []

    async def sleep(long: float) -> None:
        seconds.append(long)

    monkeypatch.setattr(server.asyncio, "sleep", sleep)
    return seconds


def test_uploads_wait_as_long_as_the_rate_limit_requires(slept: list[float]) -> None:
    async def scene() -> list[bool]:
        pace = UploadRateLimit(10, Now())
        return [await pace.wait_for_turn(20, 110.0) for _ in range(3)]

    assert asyncio.run(scene()) == [True, True, True]
    assert slept == [0.0, 2.0, 4.0]


def test_upload_that_would_miss_its_deadline_is_refused_and_uses_no_rate(
    slept: list[float],
) -> None:
    async def scene() -> list[bool]:
        pace = UploadRateLimit(10, Now())
        return [await pace.wait_for_turn(20, end) for end in (0.0, 101.0, 102.0)]

    assert asyncio.run(scene()) == [True, False, True]
    assert slept == [0.0, 2.0]


def test_upload_without_a_rate_limit_does_not_wait(slept: list[float]) -> None:
    assert asyncio.run(UploadRateLimit(None, Now()).wait_for_turn(1 << 40, 0.0))
    assert slept == []


@pytest.mark.parametrize(("error", "is_bad"), [(errno.EIO, True), (errno.ENOSPC, False)])
def test_io_error_while_serving_a_chunk_marks_the_disk_as_suspect(
    staging_node: Node, monkeypatch: pytest.MonkeyPatch, error: int, is_bad: bool
) -> None:
    async def fails(request: object) -> None:
        raise OSError(error, os.strerror(error))

    counters = UploadCountWriter(staging_node.places.peer_counts, 0.0)
    service = server.PeerService(staging_node, KeyFileAuthenticator(b"k" * 64), counters, "n1")
    monkeypatch.setattr(service, "_dispatch_request", fails)
    request = SimpleNamespace(remote="n2", transport=None)
    assert asyncio.run(service.handle_request(request)).status == 500  # type: ignore[arg-type]
    assert bool(disk_errors.read_state(staging_node.places).since) is is_bad
