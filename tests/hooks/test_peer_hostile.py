"""Peers that lie, hang, dribble or die: a copy learns why, in time, and believes nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage import credential, exchange, peers, wire
from forestage.cache import digest
from forestage.credential import Challenges, KeyFile
from forestage.errors import PeerError
from forestage.peers import Failed
from node import HANGS
from peering import CHUNK, Client, Node, free_port, image, of_chunk, span

KEY = image().key
DATA = of_chunk(0)
DIGEST = digest.of_chunk(DATA).hex()


class Fake:
    """A service in this process; it knows the key file unless told otherwise.

    `on_chunk` writes the answer to a request for a chunk: (connection, its seal's maker).
    """

    def __init__(self, on_chunk: Callable[[socket.socket, Seal], None], shared: bytes) -> None:
        self.on_chunk = on_chunk
        self.prover = KeyFile(shared)
        self.challenges = Challenges()
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
        if "challenge" in first:
            say(line, "200 OK", self.challenges.fresh(0.0).encode())
        elif "session" in first:
            with contextlib.suppress(credential.Refused):
                self.secrets.append(self.prover.read(body).secret)
            name = str(len(self.secrets) - 1)
            seal = credential.of_session(self.secrets[-1], name)
            say(line, "200 OK", json.dumps({"session": name, "seal": seal}).encode())
        else:
            secret = self.secrets[int(headers["Forestage-Session"])]
            self.on_chunk(line, Seal(secret, int(headers["Forestage-Counter"])))


class Seal:
    """Makes the head of a rightly sealed answer."""

    def __init__(self, secret: bytes, counter: int) -> None:
        self.secret, self.counter = secret, counter

    def head(
        self,
        status: int = 206,
        has: str = "1",
        told: str = DIGEST,
        length: int = CHUNK,
        secret: bytes | None = None,
    ) -> bytes:
        secret = self.secret if secret is None else secret
        seal = credential.of_answer(secret, self.counter, status, has, told, length)
        return (
            f"HTTP/1.1 {status} X\r\nForestage-Has: {has}\r\nForestage-Digest: {told}\r\n"
            f"Forestage-Seal: {seal}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


def say(line: socket.socket, status: str, body: bytes) -> None:
    line.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def good(line: socket.socket, seal: Seal) -> None:
    line.sendall(seal.head() + DATA)


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def make(
        on_chunk: Callable[[socket.socket, Seal], None] = good, shared: bytes = b"k" * 64
    ) -> Fake:
        made.append(Fake(on_chunk, shared))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[Callable[[int | str], Client]]:
    made: list[Client] = []

    def make(where: int | str) -> Client:
        address = where if isinstance(where, str) else f"127.0.0.1:{where}"
        made.append(Client(Node(tmp_path / "n2", {"n1": address}, "n2"), KEY))
        return made[-1]

    yield make
    for client in made:
        client.peers.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths, until there is a connection and a session."""
    monkeypatch.setattr(wire, "CONNECT", 0.3)
    monkeypatch.setattr(exchange, "HANDSHAKE", 0.5)


def why(client: Client, give_up: float = HANGS, wait: float = 0.0) -> str:
    with pytest.raises(Failed) as caught:
        client.fetch(0, give_up=give_up, wait=wait)
    return caught.value.why


MakeFake = Callable[..., Fake]
ClientOf = Callable[[int | str], Client]


def test_a_right_answer_is_believed(fake: MakeFake, client_of: ClientOf) -> None:
    """The one that all the lies below differ from."""
    client = client_of(fake().port)
    assert client.fetch(0) == client.fetch(0) == DATA
    assert client.has == [1, 1]


def test_one_session_and_one_connection_serve_many_chunks(
    fake: MakeFake, client_of: ClientOf
) -> None:
    server = fake()
    client = client_of(server.port)
    for _ in range(5):
        client.fetch(0)
    assert [line.split()[1][:11] for line in server.requests] == [
        "/v1/challen", "/v1/session", *["/v1/chunk/"+KEY[0]] * 5
    ]  # fmt: skip


def test_threads_that_begin_together_open_one_session(fake: MakeFake, client_of: ClientOf) -> None:
    server = fake()
    client = client_of(server.port)
    start, size = span(0)

    def fetch() -> None:
        buffer = memoryview(bytearray(CHUNK))
        client.peers.fetch(
            "n1", 0, start, size, buffer, HANGS, lambda at, piece: None, lambda: False
        )

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = [line.split()[1] for line in server.requests]
    assert (asked.count("/v1/session"), len(asked)) == (1, 10)


# --- who lies


def test_a_stranger_named_as_a_node_is_not_believed(fake: MakeFake, client_of: ClientOf) -> None:
    """He has no key file, so he cannot tell the secret, nor seal anything with it."""
    server = fake(shared=b"x" * 64)
    assert why(client_of(server.port)) == "wrong"
    assert not [line for line in server.requests if "chunk" in line], "he was not even asked"


LIES: dict[str, Callable[[socket.socket, Seal], None]] = {
    "no seal": lambda line, seal: say(line, "206 X", DATA),
    "a seal of another secret": lambda line, seal: line.sendall(seal.head(secret=b"x") + DATA),
    "another request's seal": lambda line, seal: line.sendall(
        Seal(seal.secret, seal.counter + 1).head() + DATA
    ),
    "a digest changed on the way": lambda line, seal: line.sendall(
        seal.head().replace(DIGEST.encode(), b"0" * 32) + DATA
    ),
    "wrong bytes": lambda line, seal: line.sendall(seal.head() + b"x" + DATA[1:]),
    "a last byte that is wrong": lambda line, seal: line.sendall(seal.head() + DATA[:-1] + b"x"),
    "a shorter chunk": lambda line, seal: line.sendall(seal.head(length=9) + DATA[:9]),
    "a longer chunk": lambda line, seal: line.sendall(seal.head(length=CHUNK + 1) + DATA + b"x"),
    "an absence with a wrong seal": lambda line, seal: line.sendall(
        seal.head(404, told="", length=0, secret=b"x")
    ),
    "no digest": lambda line, seal: line.sendall(seal.head(told="") + DATA),
    "no number of chunks": lambda line, seal: line.sendall(seal.head(has="-1") + DATA),
    "a digest in capitals": lambda line, seal: line.sendall(seal.head(told="A" * 32) + DATA),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_seen(fake: MakeFake, client_of: ClientOf, lie: str) -> None:
    assert why(client_of(fake(LIES[lie]).port)) == "wrong"


ODD: dict[str, Callable[[socket.socket, Seal], None]] = {
    "turned away": lambda line, seal: say(line, "403 X", b""),
    "an unsealed absence": lambda line, seal: say(line, "404 X", b""),
    "an unsealed failure": lambda line, seal: say(line, "500 X", b""),
    "a redirection": lambda line, seal: line.sendall(seal.head(301, told="", length=0)),
    "all of it": lambda line, seal: line.sendall(seal.head(200) + DATA),
    "another cut": lambda line, seal: line.sendall(seal.head(416, told="", length=0)),
    "no HTTP": lambda line, seal: line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "closed at once": lambda line, seal: line.shutdown(socket.SHUT_RDWR),
    "closed half-way": lambda line, seal: (
        line.sendall(seal.head() + DATA[:5000]),
        line.shutdown(socket.SHUT_RDWR),
    )[1],
    "a page of text": lambda line, seal: say(line, "500 X", b"x" * 100_000),
    "a head without end": lambda line, seal: line.sendall(
        b"HTTP/1.1 206 X\r\n" + b"X: y\r\n" * 100_000
    ),
    "forgets each session": lambda line, seal: say(line, "401 X", b""),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_answer_is_a_refusal(fake: MakeFake, client_of: ClientOf, odd: str) -> None:
    server = fake(ODD[odd])
    assert why(client_of(server.port)) == "refused"
    assert len(server.requests) < 9, "it is not asked for ever"


def test_an_absence_tells_what_the_peer_has(fake: MakeFake, client_of: ClientOf) -> None:
    server = fake(lambda line, seal: line.sendall(seal.head(404, has="a", told="", length=0)))
    client = client_of(server.port)
    assert (why(client), client.has) == ("absent", [10])


def test_an_absence_of_the_whole_image_tells_nothing(fake: MakeFake, client_of: ClientOf) -> None:
    server = fake(lambda line, seal: line.sendall(seal.head(503, has="", told="", length=0)))
    client = client_of(server.port)
    assert (why(client), why(client), client.has) == ("absent", "absent", [])
    assert len(server.requests) == 4, "the connection and the session are kept"


# --- who hangs


def hang(line: socket.socket, seal: Seal) -> None:
    time.sleep(600)


def stall(line: socket.socket, seal: Seal) -> None:
    line.sendall(seal.head() + DATA[:5000])
    time.sleep(600)


def dribble(line: socket.socket, seal: Seal) -> None:
    line.sendall(seal.head())
    for _ in range(6000):
        line.sendall(b"x")
        time.sleep(0.05)


def dribble_head(line: socket.socket, seal: Seal) -> None:
    line.sendall(b"HTTP/1.1 206 X\r\n")
    for _ in range(6000):
        line.sendall(b"X")
        time.sleep(0.05)


@pytest.mark.parametrize("how", [hang, stall])
def test_who_says_no_more_is_left(
    fake: MakeFake,
    client_of: ClientOf,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[socket.socket, Seal], None],
) -> None:
    monkeypatch.setattr(wire, "STALL", 0.2)
    assert why(client_of(fake(how).port)) == "silent"


@pytest.mark.parametrize("how", [dribble, dribble_head])
def test_who_does_not_come_to_an_end_is_left(
    fake: MakeFake, client_of: ClientOf, how: Callable[[socket.socket, Seal], None]
) -> None:
    assert why(client_of(fake(how).port), give_up=1.0) == "slow"


def test_a_wait_that_was_asked_for_is_no_silence(
    fake: MakeFake, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STALL", 0.2)

    def late(line: socket.socket, seal: Seal) -> None:
        time.sleep(0.5)
        monkeypatch.setattr(wire, "STALL", HANGS)  # what follows may come as slowly as it likes
        good(line, seal)

    assert client_of(fake(late).port).fetch(0, wait=HANGS) == DATA


def test_a_challenge_that_never_comes_is_given_up(client_of: ClientOf, impatient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody reads
        assert why(client_of(server.getsockname()[1])) in ("silent", "refused")


def test_a_chunk_that_came_by_another_way_is_let_go(fake: MakeFake, client_of: ClientOf) -> None:
    client = client_of(fake(stall).port)
    start, size = span(0)
    wanted: list[int] = []
    with pytest.raises(Failed) as caught:
        client.peers.fetch(
            "n1", 0, start, size, memoryview(bytearray(1000)), HANGS,
            lambda at, piece: wanted.append(at), lambda: len(wanted) > 2,
        )  # fmt: skip
    assert caught.value.why == "slow", "and not silent"


# --- who is not wanted any more


class Soon:
    """`stop` of a chunk that comes in by another way in a moment."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.over = threading.Event()

    def why(self) -> str:
        start, size = span(0)
        timer = threading.Timer(0.3, self.over.set)
        timer.start()
        with pytest.raises(Failed) as caught:
            self.client.peers.fetch(
                "n1", 0, start, size, self.client.buffer, HANGS,
                lambda at, piece: None, self.over.is_set, 0.0,
            )  # fmt: skip
        assert self.over.is_set()
        timer.join()
        door = self.client.peers._doors["n1"]
        assert door.failed is None, "others may still want something of this peer"
        return caught.value.why


@pytest.mark.parametrize("how", [hang, stall])
def test_an_answer_that_does_not_come_is_let_go(
    fake: MakeFake, client_of: ClientOf, how: Callable[[socket.socket, Seal], None]
) -> None:
    """Long before it would be called silent."""
    assert Soon(client_of(fake(how).port)).why() == "slow"


def test_a_handshake_that_does_not_come_to_an_end_is_let_go(client_of: ClientOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert Soon(client_of(server.getsockname()[1])).why() == "slow"


def test_a_connection_that_is_not_made_is_let_go(client_of: ClientOf) -> None:
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


def test_a_name_that_is_not_resolved_is_let_go(
    client_of: ClientOf, no_answer: threading.Event
) -> None:
    assert Soon(client_of("n1.example:7717")).why() == "slow"
    assert not no_answer.is_set()


def test_a_name_that_is_not_resolved_is_given_up(
    client_of: ClientOf, no_answer: threading.Event, impatient: None
) -> None:
    assert why(client_of("n1.example:7717")) == "refused"
    assert not no_answer.is_set()


def test_who_waits_for_another_threads_handshake_can_let_go(
    fake: MakeFake, client_of: ClientOf
) -> None:
    client = client_of(fake().port)
    door = client.peers._doors["n1"]
    door.lock.acquire()
    other = threading.Timer(HANGS, door.lock.release)
    other.daemon = True
    other.start()
    assert Soon(client).why() == "slow"
    other.cancel()


def test_a_credential_that_is_not_wanted_any_more_is_no_fault_of_the_peer(
    fake: MakeFake, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offer(_: KeyFile, key: str, challenge: str, stop: Callable[[], bool]) -> None:
        while not stop():
            time.sleep(0.01)
        raise PeerError("munge: signal 9")

    client = client_of(fake().port)
    monkeypatch.setattr(KeyFile, "offer", offer)
    assert Soon(client).why() == "slow"


# --- who is not there


@pytest.mark.parametrize("where", ["127.0.0.1:1", "no-such-host.invalid:7717", "[::1]:1"])
def test_who_cannot_be_reached_is_refused(client_of: ClientOf, impatient: None, where: str) -> None:
    assert why(client_of(where)) == "refused"


def test_what_befell_one_thread_is_not_tried_by_all(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for the time-out of a connection, one after the other."""
    monkeypatch.setattr(peers, "AGAIN", 3600.0)
    port = free_port()
    client = client_of(port)
    assert why(client) == "refused"
    with socket.create_server(("127.0.0.1", port)) as server:
        server.setblocking(False)
        assert why(client) == "refused"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_connection_that_was_ended_meanwhile_is_made_anew(
    fake: MakeFake, client_of: ClientOf
) -> None:
    def once(line: socket.socket, seal: Seal) -> None:
        good(line, seal)
        line.shutdown(socket.SHUT_WR)

    server = fake(once)
    client = client_of(server.port)
    assert client.fetch(0) == client.fetch(0) == DATA


# --- what is ours


def test_a_full_disk_here_is_no_fault_of_the_peer(fake: MakeFake, client_of: ClientOf) -> None:
    client = client_of(fake().port)
    start, size = span(0)

    def full(at: int, piece: memoryview) -> None:
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        client.peers.fetch("n1", 0, start, size, client.buffer, HANGS, full, lambda: False)
    assert client.fetch(0) == DATA, "what was left of the answer is not taken for the next one"


def test_wrong_bytes_on_the_peers_disk_are_seen(tmp_path: Path) -> None:
    node = Node(tmp_path / "n1", {"n1": f"127.0.0.1:{free_port()}"})
    key = node.publish()
    with node.cache.image(key).open("r+b") as file:
        file.seek(CHUNK + 77)
        file.write(b"\xff")
    node.start()
    client = Client(node, key)
    with pytest.raises(Failed) as caught:
        client.fetch(1)
    assert caught.value.why == "wrong"
    assert client.fetch(0) == DATA
    assert node.end() == 0


def test_only_a_few_connections_are_kept(
    fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forestage.peers.KEPT", 2)
    server = fake()
    node = Node(tmp_path / "n2", {f"n{n}": f"127.0.0.1:{server.port}" for n in (1, 3, 4)}, "n2")
    client = Client(node, KEY, "n[1-4]")
    for peer in ("n1", "n3", "n4", "n1"):
        assert client.fetch(0, peer=peer) == DATA
    (kept,) = client.peers._all
    assert list(kept) == ["n4", "n1"]
