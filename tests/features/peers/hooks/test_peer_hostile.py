"""Peers that lie, hang, dribble or die: a copy learns why, in time, and believes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache import digest
from forestage.config import Address
from forestage.errors import PeerError
from forestage.features.peers import auth, connection, protocol
from forestage.features.peers.auth import KeyFile
from forestage.features.peers.connection import ChunkRefused
from forestage.features.prefetch import expected
from node import HANGS
from peering import CHUNK, Client, Node, find_at, free_port, image, of_chunk

KEY = image().key
DATA = of_chunk(0)
DIGEST = digest.of_chunk(DATA).hex()


class Fake:
    """A service in this process; it knows the key file unless told otherwise.

    `on_chunk` writes the answer to a request for a chunk: (connection, the maker of its reply).
    """

    def __init__(self, on_chunk: Callable[[socket.socket, Reply], None], shared: bytes) -> None:
        self.on_chunk = on_chunk
        self.prover = KeyFile(shared)
        self.secrets = [b""]
        self.requests: list[str] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.accepts = threading.Thread(target=self.accept, daemon=True)
        self.accepts.start()

    def end(self) -> None:
        # First the thread: it may be about to call accept(2), with the number of a descriptor that
        # is the next service's as soon as it is closed here.
        self.server.shutdown(socket.SHUT_RDWR)
        self.accepts.join()
        self.server.close()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self.server.accept()
                threading.Thread(target=self.talk, args=(line,), daemon=True).start()

    def talk(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError), line, line.makefile("rb") as file:
            while first := file.readline().decode():
                headers: dict[str, str] = {}
                while (header := file.readline().decode().strip()) != "":
                    name, _, value = header.partition(": ")
                    headers[name] = value
                body = file.read(int(headers.get("Content-Length", "0"))).decode()
                self.requests.append(first.strip())
                self.answer(line, first, headers, body)

    def answer(self, line: socket.socket, first: str, headers: dict[str, str], body: str) -> None:
        if "session" in first:
            with contextlib.suppress(auth.Refused):
                self.secrets.append(self.prover.read(body).secret)
            name = str(len(self.secrets) - 1)
            mac = auth.of_session(self.secrets[-1], name)
            say(line, "200 OK", json.dumps({"session": name, "mac": mac}).encode())
        else:
            secret = self.secrets[int(headers["Forestage-Session"])]
            self.on_chunk(line, Reply(secret, int(headers["Forestage-Counter"])))


class Reply:
    """Makes the head of a response with a right MAC."""

    def __init__(self, secret: bytes, counter: int) -> None:
        self.secret, self.counter = secret, counter

    def head(
        self,
        status: int = 206,
        has: str = "1@n1",
        told: str = DIGEST,
        length: int = CHUNK,
        secret: bytes | None = None,
    ) -> bytes:
        secret = self.secret if secret is None else secret
        mac = auth.of_response(secret, self.counter, status, has, told, length)
        return (
            f"HTTP/1.1 {status} X\r\nForestage-Has: {has}\r\nForestage-Digest: {told}\r\n"
            f"Forestage-Mac: {mac}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


def say(line: socket.socket, status: str, body: bytes) -> None:
    line.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def good(line: socket.socket, reply: Reply) -> None:
    line.sendall(reply.head() + DATA)


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def make(
        on_chunk: Callable[[socket.socket, Reply], None] = good, shared: bytes = b"k" * 64
    ) -> Fake:
        made.append(Fake(on_chunk, shared))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def client_of(tmp_path: Path) -> Callable[[int | str], Client]:
    def make(where: int | str) -> Client:
        address = where if isinstance(where, str) else f"127.0.0.1:{where}"
        find_at({"n1": address})
        return Client(Node(tmp_path / "n2", "n2"), KEY)

    return make


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths, until there is a connection and a session."""
    monkeypatch.setattr(connection, "CONNECT", 0.3)
    monkeypatch.setattr(protocol, "HANDSHAKE", 0.5)


def why(client: Client, give_up: float = HANGS, wait: float = 0.0) -> str:
    return client.why(0, give_up=give_up, wait=wait)


MakeFake = Callable[..., Fake]
ClientOf = Callable[[int | str], Client]


def test_right_response_is_accepted(fake: MakeFake, client_of: ClientOf) -> None:
    """The one that all the lies below differ from."""
    server = fake()
    client = client_of(server.port)
    assert client.fetch(0) == client.fetch(0) == DATA
    assert client.has == [1, 1]
    assert len(server.requests) == 3, "of one session, on one connection"


def test_threads_starting_together_open_one_session(fake: MakeFake, client_of: ClientOf) -> None:
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


def test_server_without_key_file_is_wrong(fake: MakeFake, client_of: ClientOf) -> None:
    """Without the key file it does not know the secret, and cannot make a MAC with it."""
    server = fake(shared=b"x" * 64)
    assert why(client_of(server.port)) == "wrong"
    assert not [line for line in server.requests if "chunk" in line], "it was not even asked"


LIES: dict[str, Callable[[socket.socket, Reply], None]] = {
    "no MAC": lambda line, reply: say(line, "206 X", DATA),
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
def test_lying_response_is_wrong(fake: MakeFake, client_of: ClientOf, lie: str) -> None:
    assert why(client_of(fake(LIES[lie]).port)) == "wrong"


ODD: dict[str, Callable[[socket.socket, Reply], None]] = {
    "turned away": lambda line, reply: say(line, "403 X", b""),
    "an absence without a MAC": lambda line, reply: say(line, "404 X", b""),
    "a failure without a MAC": lambda line, reply: say(line, "500 X", b""),
    "a redirection": lambda line, reply: line.sendall(reply.head(301, told="", length=0)),
    "all of it": lambda line, reply: line.sendall(reply.head(200) + DATA),
    "another cut": lambda line, reply: line.sendall(reply.head(416, told="", length=0)),
    "no HTTP": lambda line, reply: line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "closed at once": lambda line, reply: line.shutdown(socket.SHUT_RDWR),
    "closed half-way": lambda line, reply: (
        line.sendall(reply.head() + DATA[:5000]),
        line.shutdown(socket.SHUT_RDWR),
    )[1],
    "a page of text": lambda line, reply: say(line, "500 X", b"x" * 100_000),
    "a head without end": lambda line, reply: line.sendall(
        b"HTTP/1.1 206 X\r\n" + b"X: y\r\n" * 100_000
    ),
    "forgets each session": lambda line, reply: say(line, "401 X", b""),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_response_is_refused(fake: MakeFake, client_of: ClientOf, odd: str) -> None:
    server = fake(ODD[odd])
    assert why(client_of(server.port)) == "refused"
    assert len(server.requests) < 9, "it is not asked for ever"


@pytest.mark.parametrize(("status", "has", "reported"), [(404, "a@n1", [10, 10]), (503, "", [])])
def test_absent_response_reports_what_the_peer_has_if_any(
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
def test_hanging_peer_is_silent(
    fake: MakeFake,
    client_of: ClientOf,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[socket.socket, Reply], None],
) -> None:
    monkeypatch.setattr(connection, "STALL", 0.2)
    assert why(client_of(fake(how).port)) == "silent"


@pytest.mark.parametrize("how", [dribble, dribble_head])
def test_dribbling_peer_is_slow(
    fake: MakeFake, client_of: ClientOf, how: Callable[[socket.socket, Reply], None]
) -> None:
    assert why(client_of(fake(how).port), give_up=1.0) == "slow"


def test_requested_wait_is_no_silence(
    fake: MakeFake, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL", 0.2)

    def late(line: socket.socket, reply: Reply) -> None:
        time.sleep(0.5)
        monkeypatch.setattr(
            connection, "STALL", HANGS
        )  # what follows may come as slowly as it likes
        good(line, reply)

    assert client_of(fake(late).port).fetch(0, wait=HANGS) == DATA


def test_session_never_opened_is_refused(client_of: ClientOf, impatient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody reads
        assert why(client_of(server.getsockname()[1])) in ("silent", "refused")


def test_transfer_is_stopped_when_chunk_came_otherwise(fake: MakeFake, client_of: ClientOf) -> None:
    client = client_of(fake(stall).port)
    pieces: list[int] = []
    with pytest.raises(ChunkRefused) as caught:
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
        with pytest.raises(ChunkRefused) as caught:
            self.client.fetch_to(lambda at, piece: None, stop=self.over.is_set, wait=0.0)
        assert self.over.is_set()
        timer.join()
        shared = self.client.peers._sessions["n1"]
        assert shared.failed is None, "others may still want something of this peer"
        return caught.value.why


@pytest.mark.parametrize("how", [hang, stall])
def test_response_not_coming_is_stopped(
    fake: MakeFake, client_of: ClientOf, how: Callable[[socket.socket, Reply], None]
) -> None:
    """Long before it would be called silent."""
    assert Soon(client_of(fake(how).port)).why() == "slow"


def test_handshake_not_ending_is_stopped(client_of: ClientOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert Soon(client_of(server.getsockname()[1])).why() == "slow"


def test_connection_not_made_is_stopped(client_of: ClientOf) -> None:
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


def test_name_not_resolved_is_stopped(client_of: ClientOf, no_answer: threading.Event) -> None:
    assert Soon(client_of("n1.example:7717")).why() == "slow"
    assert not no_answer.is_set()


def test_name_not_resolved_is_refused(
    client_of: ClientOf, no_answer: threading.Event, impatient: None
) -> None:
    assert why(client_of("n1.example:7717")) == "refused"
    assert not no_answer.is_set()


def test_waiting_for_handshake_of_other_thread_is_stopped(
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
def test_unreachable_peer_is_refused(client_of: ClientOf, impatient: None, where: str) -> None:
    assert why(client_of(where)) == "refused"


def test_failure_of_one_thread_is_not_repeated_by_all(
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


def test_closed_connection_is_made_again(fake: MakeFake, client_of: ClientOf) -> None:
    def once(line: socket.socket, reply: Reply) -> None:
        good(line, reply)
        line.shutdown(socket.SHUT_WR)

    server = fake(once)
    client = client_of(server.port)
    assert client.fetch(0) == client.fetch(0) == DATA


# --- what is ours


def test_full_local_disk_is_no_fault_of_the_peer(fake: MakeFake, client_of: ClientOf) -> None:
    client = client_of(fake().port)

    def full(at: int, piece: memoryview) -> None:
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        client.fetch_to(full)
    assert client.fetch(0) == DATA, "what was left of the answer is not taken for the next one"


def test_wrong_bytes_on_disk_of_peer_are_wrong(tmp_path: Path) -> None:
    node = Node(tmp_path / "n1")
    key = node.publish()
    with node.cache.image(key).open("r+b") as file:
        file.seek(CHUNK + 77)
        file.write(b"\xff")
    with node.serving():
        client = Client(node, key)
        assert client.why(1) == "wrong"
        assert client.fetch(0) == DATA


# --- the prefetch host's list


LIST = b'{"sequence": 1, "made": 1.0, "expires": 2.0}'


def listed(reply: Reply, body: bytes = LIST, length: int | None = None) -> bytes:
    told = hashlib.sha256(body).hexdigest()
    size = len(body) if length is None else length
    return reply.head(200, has="", told=told, length=size)


def ask_list(port: int, key: bytes = b"k" * 64) -> expected.Expectations:
    return expected.ask(Address("127.0.0.1", port), KeyFile(key))


def dribble(line: socket.socket, reply: Reply) -> None:
    """A byte now and then: each alone is in time."""
    line.sendall(listed(reply, length=1 << 20))
    while True:
        line.sendall(b"[")
        time.sleep(0.02)


def many(line: socket.socket, reply: Reply) -> None:
    body = b" " * expected.MOST + LIST
    line.sendall(listed(reply, body))
    line.sendall(body)


def brackets(line: socket.socket, reply: Reply) -> None:
    body = b"[" * 100_000
    line.sendall(listed(reply, body) + body)


LYING_HOSTS: dict[str, Callable[[socket.socket, Reply], None]] = {
    "no MAC": lambda line, reply: say(line, "200 OK", LIST),
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


def test_list_of_the_prefetch_host_is_taken(fake: MakeFake) -> None:
    server = fake(lambda line, reply: line.sendall(listed(reply) + LIST))
    assert ask_list(server.port) == expected.Expectations(1, 1.0, 2.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lie", LYING_HOSTS)
def test_prefetch_host_that_lies_or_hangs_gives_no_list(
    fake: MakeFake, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(expected, "PATIENCE", 1.0)
    server = fake(LYING_HOSTS[lie])
    with pytest.raises(PeerError):
        ask_list(server.port)


@pytest.mark.usefixtures("impatient")
def test_stranger_who_poses_as_the_prefetch_host_is_asked_for_nothing(fake: MakeFake) -> None:
    server = fake(lambda line, reply: line.sendall(listed(reply) + LIST))
    with pytest.raises(PeerError, match="wrong MAC"):
        ask_list(server.port, b"o" * 64)
    assert [one for one in server.requests if "expected" in one] == []


@pytest.mark.usefixtures("impatient")
def test_prefetch_host_that_is_down_or_takes_connections_only_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expected, "PATIENCE", 1.0)
    with pytest.raises(PeerError):
        ask_list(free_port())
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(PeerError):
        ask_list(mute.getsockname()[1])
