"""Peers that lie, hang, dribble or die: a copy learns why, in time, and believes nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache import digest
from forestage.features.peers import connection, local_chunks
from forestage.features.peers.connection import PeerRequestError
from node import HANGS, leased
from node import Node as Hooks
from peering import (
    CHUNK,
    Client,
    FakeService,
    Node,
    Reply,
    find_at,
    free_port,
    image,
    of_chunk,
    send_first_chunk,
    send_response,
)

KEY = image().key
DATA = of_chunk(0)
DIGEST = digest.digest_chunk(DATA).hex()


@pytest.fixture
def client_of(tmp_path: Path) -> Callable[[int | str], Client]:
    def make(where: int | str) -> Client:
        address = where if isinstance(where, str) else f"127.0.0.1:{where}"
        find_at({"n1": address})
        return Client(Node(tmp_path / "n2", "n2"), KEY)

    return make


def why(client: Client, give_up: float = HANGS, wait: float = 0.0) -> str:
    return client.why(0, give_up=give_up, wait=wait)


MakeFake = Callable[..., FakeService]
ClientOf = Callable[[int | str], Client]


def test_client_accepts_a_correct_chunk_response(fake: MakeFake, client_of: ClientOf) -> None:
    """The one that all the lies below differ from."""
    server = fake()
    client = client_of(server.port)
    assert client.fetch(0) == client.fetch(0) == DATA
    assert client.has == [1, 1]
    assert len(server.requests) == 3, "of one session, on one connection"


def test_concurrent_client_threads_open_one_session(fake: MakeFake, client_of: ClientOf) -> None:
    server = fake()
    client = client_of(server.port)
    threads = [
        threading.Thread(target=client.fetch_to, args=(lambda at, piece: None,)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = [line.split()[1] for line in server.requests]
    assert (asked.count("/v1/session"), len(asked)) == (1, 9)


# --- who lies


def test_server_with_another_key_is_rejected_as_wrong_before_any_chunk_request(
    fake: MakeFake, client_of: ClientOf
) -> None:
    """Without the key file it does not know the secret, and cannot make a MAC with it."""
    server = fake(shared=b"x" * 64)
    assert why(client_of(server.port)) == "wrong"
    assert not [line for line in server.requests if "chunk" in line], "it was not even asked"


LIES: dict[str, Callable[[socket.socket, Reply], None]] = {
    "no MAC": lambda line, reply: send_response(line, "206 X", DATA),
    "a MAC of another secret": lambda line, reply: line.sendall(reply.head(secret=b"x") + DATA),
    "another request's MAC": lambda line, reply: line.sendall(
        Reply(reply.secret, reply.counter + 1).head() + DATA
    ),
    "a digest changed on the way": lambda line, reply: line.sendall(
        reply.head().replace(DIGEST.encode(), b"0" * 32) + DATA
    ),
    "wrong bytes": lambda line, reply: line.sendall(reply.head() + b"x" + DATA[1:]),
    "a last byte that is wrong": lambda line, reply: line.sendall(reply.head() + DATA[:-1] + b"x"),
    "a shorter chunk": lambda line, reply: line.sendall(reply.head(length=9) + DATA[:9]),
    "a longer chunk": lambda line, reply: line.sendall(reply.head(length=CHUNK + 1) + DATA + b"x"),
    "an absence with a wrong MAC": lambda line, reply: line.sendall(
        reply.head(404, told="", length=0, secret=b"x")
    ),
    "no digest": lambda line, reply: line.sendall(reply.head(told="") + DATA),
    "no number of chunks": lambda line, reply: line.sendall(reply.head(has="-1@n1") + DATA),
    "nobody who read it": lambda line, reply: line.sendall(reply.head(has="1") + DATA),
    "a digest in capitals": lambda line, reply: line.sendall(reply.head(told="A" * 32) + DATA),
}


@pytest.mark.parametrize("lie", LIES)
def test_falsified_chunk_response_is_rejected_as_wrong(
    fake: MakeFake, client_of: ClientOf, lie: str
) -> None:
    assert why(client_of(fake(LIES[lie]).port)) == "wrong"


ODD: dict[str, Callable[[socket.socket, Reply], None]] = {
    "turned away": lambda line, reply: send_response(line, "403 X", b""),
    "an absence without a MAC": lambda line, reply: send_response(line, "404 X", b""),
    "a failure without a MAC": lambda line, reply: send_response(line, "500 X", b""),
    "a redirection": lambda line, reply: line.sendall(reply.head(301, told="", length=0)),
    "all of it": lambda line, reply: line.sendall(reply.head(200) + DATA),
    "another cut": lambda line, reply: line.sendall(reply.head(416, told="", length=0)),
    "no HTTP": lambda line, reply: line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "closed at once": lambda line, reply: line.shutdown(socket.SHUT_RDWR),
    "closed half-way": lambda line, reply: (
        line.sendall(reply.head() + DATA[:5000]),
        line.shutdown(socket.SHUT_RDWR),
    )[1],
    "a page of text": lambda line, reply: send_response(line, "500 X", b"x" * 100_000),
    "a head without end": lambda line, reply: line.sendall(
        b"HTTP/1.1 206 X\r\n" + b"X: y\r\n" * 100_000
    ),
    "forgets each session": lambda line, reply: send_response(line, "401 X", b""),
}


@pytest.mark.parametrize("odd", ODD)
def test_malformed_chunk_response_is_treated_as_refused(
    fake: MakeFake, client_of: ClientOf, odd: str
) -> None:
    server = fake(ODD[odd])
    assert why(client_of(server.port)) == "refused"
    assert len(server.requests) < 9, "it is not asked for ever"


@pytest.mark.parametrize(("status", "has", "reported"), [(404, "a@n1", [10, 10]), (503, "", [])])
def test_absent_chunk_response_reports_the_peers_chunk_set(
    fake: MakeFake, client_of: ClientOf, status: int, has: str, reported: list[int]
) -> None:
    server = fake(lambda line, reply: line.sendall(reply.head(status, has, told="", length=0)))
    client = client_of(server.port)
    assert (why(client), why(client), client.has) == ("absent", "absent", reported)
    assert len(server.requests) == 3, "the connection and the session are kept"


# --- who hangs


def hang(line: socket.socket, reply: Reply) -> None:
    time.sleep(600)


def stall(line: socket.socket, reply: Reply) -> None:
    line.sendall(reply.head() + DATA[:5000])
    time.sleep(600)


def dribble(line: socket.socket, reply: Reply) -> None:
    line.sendall(reply.head())
    for _ in range(6000):
        line.sendall(b"x")
        time.sleep(0.05)


def dribble_head(line: socket.socket, reply: Reply) -> None:
    line.sendall(b"HTTP/1.1 206 X\r\n")
    for _ in range(6000):
        line.sendall(b"X")
        time.sleep(0.05)


@pytest.mark.parametrize("how", [hang, stall])
def test_peer_that_stops_sending_is_treated_as_silent(
    fake: MakeFake,
    client_of: ClientOf,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[socket.socket, Reply], None],
) -> None:
    monkeypatch.setattr(connection, "SILENCE_TIMEOUT", 0.2)
    assert why(client_of(fake(how).port)) == "silent"


@pytest.mark.parametrize("how", [dribble, dribble_head])
def test_peer_that_sends_single_bytes_is_treated_as_slow(
    fake: MakeFake, client_of: ClientOf, how: Callable[[socket.socket, Reply], None]
) -> None:
    assert why(client_of(fake(how).port), give_up=1.0) == "slow"


def test_chunk_sent_within_the_requested_wait_is_accepted_beyond_the_stall_limit(
    fake: MakeFake, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_TIMEOUT", 0.2)

    def late(line: socket.socket, reply: Reply) -> None:
        time.sleep(0.5)
        monkeypatch.setattr(
            connection, "SILENCE_TIMEOUT", HANGS
        )  # what follows may come as slowly as it likes
        send_first_chunk(line, reply)

    assert client_of(fake(late).port).fetch(0, wait=HANGS) == DATA


def test_peer_that_never_accepts_the_session_is_silent_or_refused(
    client_of: ClientOf, impatient: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody reads
        assert why(client_of(server.getsockname()[1])) in ("silent", "refused")


def test_chunk_transfer_stops_as_slow_once_the_chunk_came_another_way(
    fake: MakeFake, client_of: ClientOf
) -> None:
    client = client_of(fake(stall).port)
    pieces: list[int] = []
    with pytest.raises(PeerRequestError) as caught:
        client.fetch_to(
            lambda at, piece: pieces.append(at), stop=lambda: len(pieces) > 2, piece_size=1000
        )
    assert caught.value.why == "slow", "and not silent"


# --- who is not wanted any more


class Soon:
    """`stop` of a chunk that comes in by another way in a moment."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.over = threading.Event()

    def why(self) -> str:
        timer = threading.Timer(0.3, self.over.set)
        timer.start()
        with pytest.raises(PeerRequestError) as caught:
            self.client.fetch_to(lambda at, piece: None, stop=self.over.is_set, wait=0.0)
        assert self.over.is_set()
        timer.join()
        shared = self.client.peers._sessions["n1"]
        assert shared.failed is None, "others may still want something of this peer"
        return caught.value.why


@pytest.mark.parametrize("how", [hang, stall])
def test_wait_for_a_chunk_response_stops_once_the_chunk_came_another_way(
    fake: MakeFake, client_of: ClientOf, how: Callable[[socket.socket, Reply], None]
) -> None:
    """Long before it would be called silent."""
    assert Soon(client_of(fake(how).port)).why() == "slow"


def test_wait_for_a_handshake_stops_once_the_chunk_came_another_way(client_of: ClientOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert Soon(client_of(server.getsockname()[1])).why() == "slow"


def test_wait_for_a_connection_stops_once_the_chunk_came_another_way(client_of: ClientOf) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # then the kernel drops who comes
            line = stack.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(server.getsockname())
        assert Soon(client_of(server.getsockname()[1])).why() == "slow"


@pytest.fixture
def no_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A name service that does not answer while the test lasts; set when it did after all."""
    ended, test_ended = threading.Event(), threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        test_ended.wait(HANGS)
        ended.set()
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield ended
    test_ended.set()


def test_wait_for_name_resolution_stops_once_the_chunk_came_another_way(
    client_of: ClientOf, no_answer: threading.Event
) -> None:
    assert Soon(client_of("n1.example:7717")).why() == "slow"
    assert not no_answer.is_set()


def test_peer_name_that_is_not_resolved_in_time_is_refused(
    client_of: ClientOf, no_answer: threading.Event, impatient: None
) -> None:
    assert why(client_of("n1.example:7717")) == "refused"
    assert not no_answer.is_set()


def test_wait_for_another_threads_handshake_stops_once_the_chunk_came_another_way(
    fake: MakeFake, client_of: ClientOf
) -> None:
    client = client_of(fake().port)
    door = client.peers._sessions["n1"]
    door.lock.acquire()
    other = threading.Timer(HANGS, door.lock.release)
    other.daemon = True
    other.start()
    assert Soon(client).why() == "slow"
    other.cancel()


# --- who is not there


@pytest.mark.parametrize("where", ["127.0.0.1:1", "no-such-host.invalid:7717", "[::1]:1"])
def test_unreachable_peer_is_reported_as_refused(
    client_of: ClientOf, impatient: None, where: str
) -> None:
    assert why(client_of(where)) == "refused"


def test_failed_connection_to_a_peer_is_not_retried_by_other_threads_at_once(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for the time-out of a connection, one after the other."""
    monkeypatch.setattr("forestage.features.peers.client.AGAIN", 3600.0)
    port = free_port()
    client = client_of(port)
    assert why(client) == "refused"
    with socket.create_server(("127.0.0.1", port)) as server:
        server.setblocking(False)
        assert why(client) == "refused"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_client_reconnects_after_the_peer_closed_the_connection(
    fake: MakeFake, client_of: ClientOf
) -> None:
    def once(line: socket.socket, reply: Reply) -> None:
        send_first_chunk(line, reply)
        line.shutdown(socket.SHUT_WR)

    server = fake(once)
    client = client_of(server.port)
    assert client.fetch(0) == client.fetch(0) == DATA


# --- what is ours


def test_write_error_on_the_local_disk_leaves_the_peer_usable(
    fake: MakeFake, client_of: ClientOf
) -> None:
    client = client_of(fake().port)

    def full(at: int, piece: memoryview) -> None:
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        client.fetch_to(full)
    assert client.fetch(0) == DATA, "what was left of the answer is not taken for the next one"


def test_chunk_corrupted_on_the_peers_disk_is_rejected_as_wrong(tmp_path: Path) -> None:
    node = Node(tmp_path / "n1")
    key = node.publish()
    with node.cache.image_path(key).open("r+b") as file:
        file.seek(CHUNK + 77)
        file.write(b"\xff")
    with node.serving():
        client = Client(node, key)
        assert client.why(1) == "wrong"
        assert client.fetch(0) == DATA


def test_chunk_of_an_entry_under_a_file_lease_is_absent_without_waiting(node: Hooks) -> None:
    path = node.put("alice/image.sqsh")
    assert node.prolog(1, path).outcome.result == "copied"
    key = node.identity(path).key
    with leased(path) as held:
        assert isinstance(local_chunks.locate_chunk(node.cache, key, 0), local_chunks.AbsentChunk)
        assert held(), "the service waited until the kernel broke the lease"
    found = local_chunks.locate_chunk(node.cache, key, 0)
    assert isinstance(found, local_chunks.PresentChunk)
    found.file.close()
