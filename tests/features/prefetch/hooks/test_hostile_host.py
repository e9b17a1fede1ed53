"""A prefetch host that lies, hangs or dribbles gives no list, and a stranger is told nothing."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable

import pytest

from forestage.config import ServiceAddress
from forestage.errors import PeerError
from forestage.features.peers.auth import KeyFileAuthenticator
from forestage.features.prefetch import expected_list
from node import HANGS
from peering import FakeService, Reply, free_port, send_response

MakeFake = Callable[..., FakeService]

LIST = b'{"sequence": 1, "made": 1.0, "expires": 2.0}'


def listed(reply: Reply, body: bytes = LIST, length: int | None = None) -> bytes:
    told = hashlib.sha256(body).hexdigest()
    size = len(body) if length is None else length
    return reply.head(200, has="", told=told, length=size)


def ask_list(port: int, key: bytes = b"k" * 64) -> expected_list.ExpectedImageList:
    return expected_list.fetch_list(ServiceAddress("127.0.0.1", port), KeyFileAuthenticator(key))


def dribble(line: socket.socket, reply: Reply) -> None:
    """A byte now and then: each alone is in time."""
    line.sendall(listed(reply, length=1 << 20))
    while True:
        line.sendall(b"[")
        time.sleep(0.02)


def many(line: socket.socket, reply: Reply) -> None:
    body = b" " * expected_list.MAX_REPLY_BYTES + LIST
    line.sendall(listed(reply, body))
    line.sendall(body)


def brackets(line: socket.socket, reply: Reply) -> None:
    body = b"[" * 100_000
    line.sendall(listed(reply, body) + body)


LYING_HOSTS: dict[str, Callable[[socket.socket, Reply], None]] = {
    "no MAC": lambda line, reply: send_response(line, "200 OK", LIST),
    "a MAC of another secret": lambda line, reply: line.sendall(
        listed(Reply(b"x", reply.counter)) + LIST
    ),
    "an answer given again": lambda line, reply: line.sendall(
        listed(Reply(reply.secret, reply.counter + 1)) + LIST
    ),
    "another body": lambda line, reply: line.sendall(listed(reply) + LIST.replace(b"1", b"3", 1)),
    "a huge one": many,
    "one without an end": lambda line, reply: line.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 1000
    ),
    "one that is cut": lambda line, reply: (line.sendall(listed(reply) + LIST[:9]), line.close()),
    "brackets": brackets,
    "no list": lambda line, reply: line.sendall(reply.head(404, has="", told="", length=0)),
    "silence": lambda line, reply: time.sleep(HANGS),
    "a byte now and then": dribble,
}


def test_list_from_the_prefetch_host_is_received(fake: MakeFake) -> None:
    server = fake(lambda line, reply: line.sendall(listed(reply) + LIST))
    assert ask_list(server.port) == expected_list.ExpectedImageList(1, 1.0, 2.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lie", LYING_HOSTS)
def test_false_or_slow_reply_of_a_prefetch_host_raises_a_peer_error(
    fake: MakeFake, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(expected_list, "PATIENCE", 1.0)
    server = fake(LYING_HOSTS[lie])
    with pytest.raises(PeerError):
        ask_list(server.port)


@pytest.mark.usefixtures("impatient")
def test_prefetch_host_with_a_wrong_key_is_sent_no_request(fake: MakeFake) -> None:
    server = fake(lambda line, reply: line.sendall(listed(reply) + LIST))
    with pytest.raises(PeerError, match="wrong MAC"):
        ask_list(server.port, b"o" * 64)
    assert [one for one in server.requests if "expected" in one] == []


@pytest.mark.usefixtures("impatient")
def test_unreachable_or_silent_prefetch_host_raises_a_peer_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expected_list, "PATIENCE", 1.0)
    with pytest.raises(PeerError):
        ask_list(free_port())
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(PeerError):
        ask_list(mute.getsockname()[1])
