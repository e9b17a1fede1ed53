"""A node's peer service, as a real process: it gives what it should, and nothing to strangers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.cache import arrival_map, digest
from forestage.cache.part import ENTRY_BYTES, Part
from forestage.config import Config
from forestage.errors import PeerError
from forestage.features.peers import activation, auth, proven_node, queried_node, upload_counts
from forestage.features.peers.auth import KeyFileAuthenticator
from forestage.features.peers.engine import MAX_SHARED
from forestage.features.peers.queried_node import PeerNodeClient, query_node
from node import ALICE, HANGS, until
from peering import (
    CHUNK,
    COUNT,
    SIZE,
    Client,
    Node,
    Stranger,
    image,
    of_chunk,
    stager,
)

SHARED = KeyFileAuthenticator(b"k" * 64)
OTHER_KEY = "0" * 32


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("n1"))
    made.publish()
    with made.serving():
        yield made


@pytest.fixture
def own_node(tmp_path: Path) -> Node:
    """Another one, for the test alone."""
    return Node(tmp_path / "n1")


@pytest.fixture
def key() -> str:
    return image().key


@pytest.fixture
def known(node: Node, key: str) -> Stranger:
    """Root of the cluster, with a session, who may ask for anything."""
    return logged_in(node, key)


def logged_in(node: Node, key: str) -> Stranger:
    made = Stranger(node.port)
    assert made.log_in(SHARED, key) == 200
    return made


@pytest.fixture
def copying(node: Node) -> Iterator[Part]:
    """A live copy under way, of which nothing is in."""
    with stager(node, seed=2) as pid:
        yield node.part(seed=2, pid=pid)
    node.cache.drop_part(image(2).key)
    shutil.rmtree(node.cache.entry_dir(image(2).key), ignore_errors=True)


# --- what it gives


def test_peer_service_gives_each_chunk_of_an_entry_with_its_exact_bytes(
    node: Node, key: str
) -> None:
    client = Client(node, key)
    assert [client.fetch(number) for number in range(COUNT)] == [
        of_chunk(number) for number in range(COUNT)
    ]
    assert client.has == [(1 << COUNT) - 1] * COUNT


def test_peer_service_gives_no_chunk_while_the_node_is_switched_off(node: Node, key: str) -> None:
    """Its bytes may be why: off serves no job of another node either."""
    client = Client(node, key)
    assert client.fetch(0) == of_chunk(0)
    node.places.disabled.write_text("INC-42: wrong bytes?\n")
    try:
        assert (client.why(1), client.has[1:]) == ("absent", [0])
    finally:
        node.places.disabled.unlink()
    assert client.fetch(1) == of_chunk(1)


@pytest.mark.parametrize("published", [False, True])
def test_peer_service_gives_a_chunk_that_arrives_during_the_wait(
    node: Node, copying: Part, published: bool
) -> None:
    client = Client(node, image(2).key)
    if published:  # but for the one: what is there as that arrives is no race
        for number in {*range(COUNT)} - {2}:
            node.bring(copying, number, seed=2)
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(client.fetch(2, wait=90.0)))
    waiter.start()
    time.sleep(0.2)
    assert not found
    if published:
        node.finish(copying, seed=2)
    else:
        node.bring(copying, 2, seed=2)
    waiter.join()
    assert found == [of_chunk(2, seed=2)]
    assert client.has == [(1 << COUNT) - 1 if published else 1 << 2]


@pytest.mark.parametrize(("wait", "wanted"), [(0.1, [1]), (0.0, [])])
def test_chunk_requested_with_a_wait_is_marked_as_wanted_in_the_running_copy(
    node: Node, copying: Part, wait: float, wanted: list[int]
) -> None:
    key = image(2).key
    memory = arrival_map.create_map(node.places.through / key, SIZE, CHUNK, copying.image)
    assert memory is not None
    assert Client(node, key).why(1, wait=wait) == "absent"
    assert memory.list_wanted() == wanted


def test_chunk_that_does_not_arrive_is_absent_after_the_wait(node: Node, copying: Part) -> None:
    node.bring(copying, 0, seed=2)
    client = Client(node, image(2).key)
    assert (client.why(1, wait=0.1), client.has) == ("absent", [1])


def test_peer_service_reports_its_copys_failed_source_to_clients(node: Node, copying: Part) -> None:
    """Else each of the others waits for what it should read, and would read it."""
    node.bring(copying, 0, seed=2)
    client = Client(node, image(2).key)
    client.fetch(0)
    assert not client.source_failed
    copying.source_failed.touch()
    client.fetch(0)
    assert (client.has, client.source_failed) == ([1, 1], True)


def test_peer_service_reports_a_killed_stager_as_a_failed_source(node: Node) -> None:
    """Else the others ask it for what it should read, again and again, and nobody reads it."""
    with stager(node, seed=3) as pid:
        part = node.part(seed=3, pid=pid)
        node.bring(part, 0, seed=3)
        client = Client(node, image(3).key)
        client.fetch(0)
        assert not client.source_failed
    assert client.why(1) == "absent"
    assert (client.has, client.source_failed) == ([1, 1], True)


def test_peer_service_gives_a_complete_chunk_of_a_dead_copy(node: Node, known: Stranger) -> None:
    part = node.part(seed=3, pid=0)
    known.log_in(SHARED, image(3).key)
    assert known.chunk(image(3).key, 0) == 404
    node.bring(part, 0, seed=3)
    assert known.chunk(image(3).key, 0, wait="5") == 206


def test_chunk_upload_completes_if_the_entry_is_evicted_meanwhile(node: Node) -> None:
    """The first piece has come; the rest, still to be sent, is no longer under any name."""
    key = node.publish(seed=7)
    client = Client(node, key)
    pieces: list[bytes] = []

    def write(at: int, piece: memoryview) -> None:
        if not pieces:
            node.cache.evict_entry(key)
            node.cache.delete_evicted()
        pieces.append(bytes(piece))

    client.fetch_to(write, number=1)
    assert b"".join(pieces) == of_chunk(1, seed=7)
    assert client.why(1) == "absent"


def test_largest_chunk_set_that_peers_share_fits_the_response_header(node: Node) -> None:
    key = node.publish(seed=9)
    file = node.cache.entry_dir(key) / "map"
    digests = file.read_bytes()[: COUNT * ENTRY_BYTES]
    file.write_bytes(digests.ljust(MAX_SHARED * ENTRY_BYTES, b"\1"))
    client = Client(node, key)
    assert client.fetch(0) == of_chunk(0, seed=9)
    assert client.has == [(1 << MAX_SHARED) - 1]


# --- what it does not


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/chunk",
        "/v1/chunk/",
        "/v1/chunk/../../etc/passwd",
        "/v1/chunk/%2e%2e/0",
        "/v1/chunk/{key}",
        "/v1/chunk/{key}/",
        "/v1/chunk/{key}/-1",
        "/v1/chunk/{key}/00",
        "/v1/chunk/{key}/1e0",
        "/v1/chunk/{key}/%30",
        "/v1/chunk/{key}/0/",
        "/v1/chunk/{key}/0?x",
        "/v1/chunk/{key}/../{key}/0",
        "/v1/chunk/{key}/1234567890",
        "/v1/chunk/{key}0/0",
        "/v1/chunk/{upper}/0",
        "/v1/chunk//etc/passwd/0",
        "//v1/chunk/{key}/0",
        "http://127.0.0.1/v1/chunk/{key}/0",
    ],
)
def test_chunk_request_with_a_malformed_path_is_refused(
    known: Stranger, key: str, path: str
) -> None:
    asked = path.format(key=key, upper=key.upper().replace("0", "A"))
    assert known.chunk(key, 0, path=asked) in (400, 404)
    assert known.chunk(key, 0) == 206


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_chunk_request_with_another_http_method_gets_404(node: Node, key: str, method: str) -> None:
    assert Stranger(node.port).ask(f"/v1/chunk/{key}/0", method)[0] == 404


def test_chunk_request_without_a_session_gets_401_for_known_and_unknown_keys(
    node: Node, key: str
) -> None:
    assert Stranger(node.port).ask(f"/v1/chunk/{key}/0", Range="bytes=0-1048575")[0] == 401
    for asked in (key, OTHER_KEY):
        assert Stranger(node.port).chunk(asked, 0) == 401


@pytest.mark.parametrize("guess", [b"", b"guessed"])
def test_chunk_request_with_a_session_number_but_a_wrong_secret_gets_403(
    node: Node, known: Stranger, key: str, guess: bytes
) -> None:
    thief = Stranger(node.port)
    thief.session, thief.secret, thief.counter = known.session, guess, 1000
    assert thief.chunk(key, 0) == 403


def test_replayed_chunk_request_gets_403(known: Stranger, key: str) -> None:
    assert known.chunk(key, 0, counter=7) == 206
    assert known.chunk(key, 0, counter=7) == 403
    assert known.chunk(key, 0, counter=6) == 206, "threads do not ask in order"


@pytest.mark.parametrize("counter", ["", "-1", "x", "1.0", "9" * 19, "١"])
def test_chunk_request_with_an_invalid_counter_gets_401(
    known: Stranger, key: str, counter: str
) -> None:
    said = counter.encode().decode("latin-1")
    path = f"/v1/chunk/{key}/0"
    assert known.ask(path, Forestage_Session=known.session, Forestage_Counter=said)[0] == 401


def test_session_of_one_key_gets_403_for_another_key(node: Node, known: Stranger) -> None:
    other = node.publish(seed=8)
    assert known.chunk(other, 0) == 403


def test_chunk_request_for_an_unknown_key_gets_404(known: Stranger) -> None:
    known.log_in(SHARED, OTHER_KEY)
    assert known.chunk(OTHER_KEY, 0) == 404


@pytest.mark.parametrize("number", [COUNT, 999999999])
def test_chunk_number_out_of_range_gets_416(known: Stranger, key: str, number: int) -> None:
    assert known.chunk(key, number) == 416


@pytest.mark.parametrize(
    "within",
    [
        "",
        "bytes=0-",
        "bytes=-5",
        "bytes=0-0",
        f"bytes=0-{CHUNK}",
        f"bytes=0-{CHUNK - 1},5-6",
        f"bytes=1-{CHUNK - 1}",
        f"bytes={CHUNK}-{2 * CHUNK - 1}",
        f"bytes=0-{SIZE - 1}",
        f"chars=0-{CHUNK - 1}",
    ],
)
def test_chunk_request_with_a_range_other_than_the_chunk_gets_416(
    known: Stranger, key: str, within: str
) -> None:
    assert known.chunk(key, 0, within=within) == 416


def test_chunk_request_with_another_chunk_size_gets_416_before_the_wait(
    copying: Part, known: Stranger
) -> None:
    known.log_in(SHARED, image(2).key)
    assert known.chunk(image(2).key, 0, within="bytes=0-16777215", wait="5") == 416


# --- looks at directories


@pytest.fixture
def published_scan(node: Node) -> Iterator[Path]:
    """What n1 has found for job 7, of which the name is OTHER_KEY."""
    directory = node.cache.looks / "7"
    directory.mkdir(parents=True)
    (directory / OTHER_KEY).write_bytes(b"found")
    (directory / f"{OTHER_KEY}.files").write_bytes(b"files")
    yield directory
    shutil.rmtree(node.cache.looks)


def first(node: Node, job: int = 7, name: str = OTHER_KEY) -> PeerNodeClient:
    return query_node(node.config, node.places, "n1", name, f"/v1/look/{job}/{name}")


def test_peer_service_gives_a_published_scan_and_its_file_list(
    node: Node, published_scan: Path
) -> None:
    asked = first(node)
    assert (asked.query(), asked.query(".files"), asked.query()) == (b"found", b"files", b"found")
    (published_scan / OTHER_KEY).unlink()
    assert asked.query() is None
    assert first(node, job=8).query() is None
    asked.close()


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/look/7/{OTHER_KEY}.json",
        f"/v1/look/7/{OTHER_KEY}/",
        f"/v1/look/07/{OTHER_KEY}",
        f"/v1/look/../looks/7/{OTHER_KEY}",
        "/v1/look/7/../../format",
    ],
)
def test_scan_request_with_a_malformed_path_gets_404(
    node: Node, published_scan: Path, path: str
) -> None:
    assert logged_in(node, OTHER_KEY).chunk(OTHER_KEY, 0, path=path, within="") == 404


def test_scan_is_given_only_to_a_session_of_its_own_name(
    node: Node, published_scan: Path, key: str
) -> None:
    path = f"/v1/look/7/{OTHER_KEY}"
    assert Stranger(node.port).chunk(OTHER_KEY, 0, path=path, within="") == 401
    assert logged_in(node, key).chunk(OTHER_KEY, 0, path=path, within="") == 403
    known = logged_in(node, OTHER_KEY)
    assert known.chunk(OTHER_KEY, 0, path=path, within="") == 200
    known.secret = b"guessed"
    assert known.chunk(OTHER_KEY, 0, path=path, within="") == 403


def test_link_in_place_of_a_published_scan_is_not_followed(
    node: Node, published_scan: Path
) -> None:
    (published_scan / OTHER_KEY).unlink()
    (published_scan / OTHER_KEY).symlink_to("/etc/passwd")
    with pytest.raises(PeerError):
        first(node).query()


@pytest.mark.parametrize("lie", ["bytes", "mac", "none"])
def test_scan_response_changed_in_transit_is_rejected(
    node: Node, published_scan: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    real = http.client.HTTPResponse.read
    get = http.client.HTTPMessage.get

    def read(response: http.client.HTTPResponse, *size: int) -> bytes:
        found = real(response, *size)
        if lie == "none":
            response.status = 404
        return b"FOUND" if found == b"found" and lie == "bytes" else found

    def header(message: http.client.HTTPMessage, name: str, *otherwise: object) -> object:
        return "0" * 64 if lie == "mac" and "Mac" in name else get(message, name, *otherwise)

    monkeypatch.setattr(http.client.HTTPResponse, "read", read)
    monkeypatch.setattr(http.client.HTTPMessage, "get", header)
    with pytest.raises(PeerError, match="wrong"):
        first(node).query()


def test_scan_response_over_the_size_limit_is_rejected(
    node: Node, published_scan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queried_node, "MAX_REPLY_BYTES", 4)
    with pytest.raises(PeerError, match="5 bytes"):
        first(node).query()


def test_scan_client_reconnects_after_a_restart_of_the_peer_service(own_node: Node) -> None:
    (own_node.cache.looks / "7").mkdir(parents=True)
    (own_node.cache.looks / "7" / OTHER_KEY).write_bytes(b"found")
    asked = first(own_node)
    for _ in range(2):
        with own_node.serving():
            assert asked.query() == b"found"


# --- credentials


@pytest.mark.parametrize(
    "text", ["", "{}", "MUNGE:AwQDAAA:", "\0", '{"protocol":"forestage-1"}', "[" * 4000, "é" * 9]
)
def test_invalid_credential_opens_no_session(node: Node, text: str) -> None:
    assert Stranger(node.port).ask("/v1/session", "POST", text.encode())[0] in (403, 413)


def test_credential_of_another_key_file_opens_no_session(node: Node, key: str) -> None:
    assert Stranger(node.port).log_in(KeyFileAuthenticator(b"x" * 64), key) == 403


def test_credential_opens_one_session_only(node: Node, key: str) -> None:
    offer = SHARED.make_credential(key)
    assert [Stranger(node.port).send_credential(offer) for _ in range(2)] == [200, 403]


def test_replayed_credential_on_another_node_opens_a_session_that_gets_no_chunk(
    own_node: Node, known: Stranger, key: str
) -> None:
    """Neither a request of one's own nor one that was recorded has a right MAC there."""
    offer = SHARED.make_credential(key)
    assert known.send_credential(offer) == 200
    assert known.chunk(key, 0, counter=5) == 206
    own_node.publish()
    with own_node.serving():
        thief = Stranger(own_node.port)
        assert thief.send_credential(offer) == 200
        assert thief.chunk(key, 0, counter=5, made_for=known.session) == 403
        thief.secret = b"guessed"
        assert thief.chunk(key, 0) == 403


# --- what it bears


def test_request_with_huge_headers_path_or_body_is_refused(
    node: Node, known: Stranger, key: str
) -> None:
    for headers in ({"X": "y" * 100_000}, {f"X{n}": "y" for n in range(1000)}):
        assert Stranger(node.port).ask("/v1/session", **headers)[0] == 400
    assert Stranger(node.port).ask("/v1/session", "POST", b"x" * 100_000)[0] == 413
    assert Stranger(node.port).ask(f"/v1/{'x' * 100_000}")[0] == 400
    assert known.chunk(key, 0) == 206


def test_endless_request_bodies_do_not_grow_the_peer_services_memory(
    node: Node, known: Stranger, key: str
) -> None:
    """The service is still there for others, and has hardly grown."""
    assert node.process is not None
    before = resident(node.process.pid)
    with contextlib.ExitStack() as lines:
        for _ in range(20):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", node.port)))
            line.sendall(b"POST /v1/session HTTP/1.1\r\nHost: n1\r\nContent-Length: 4096\r\n\r\nx")
        for _ in range(20):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", node.port)))
            line.sendall(b"POST /v1/x HTTP/1.1\r\nHost: n1\r\nContent-Length: 4000000000\r\n\r\n")
            line.setblocking(False)
            with contextlib.suppress(OSError):  # it was cut off, or is read no more
                for _ in range(1000):
                    line.send(b"x" * 65536)
        assert known.chunk(key, 0) == 206
        assert resident(node.process.pid) - before < 32 << 20


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_silent_connections_beyond_the_limit_are_closed_and_known_clients_served(
    node: Node, known: Stranger, key: str
) -> None:
    """More of them than there is room for: the oldest are cut off, those who are known are not."""
    with contextlib.ExitStack() as lines:
        idle = [
            lines.enter_context(socket.create_connection(("127.0.0.1", node.port), HANGS))
            for _ in range(300)
        ]
        assert known.chunk(key, 0) == 206
        assert logged_in(node, key).chunk(key, 1) == 206
        assert idle[0].recv(1) == b"", "the first of them was cut off"


ONE_UPLOAD = "from forestage.features.peers import server; server.MAX_UPLOADS = 1\n"
BIG = 64 << 20
BIG_SPAN = f"bytes=0-{BIG - 1}"


def grown(node: Node) -> str:
    """The key of an entry whose only chunk is a large one."""
    key = node.publish()
    entry = node.cache.find_entry_by_key(key)
    assert entry is not None
    identity = msgspec.structs.replace(entry.identity, size=BIG)
    larger = msgspec.structs.replace(entry, identity=identity, chunk=BIG)
    with node.cache.image_path(key).open("r+b") as file:
        file.truncate(BIG)
    (node.cache.entry_dir(key) / "map").write_bytes(digest.digest_chunk(b"x"))
    (node.cache.entry_dir(key) / "entry.json").write_bytes(msgspec.json.encode(larger))
    return key


def reads_late(node: Node, key: str) -> Stranger:
    """A client with little room for what it does not read."""
    made = Stranger(node.port)
    made.http.connect()
    made.http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert made.log_in(SHARED, key) == 200
    return made


def start_chunk(stranger: Stranger, key: str) -> None:
    """Asks for the large chunk, and does not read beyond the answer's head."""
    path = f"/v1/chunk/{key}/0"
    mac = auth.request_mac(stranger.secret, stranger.session, "GET", path, BIG_SPAN, 500)
    stranger.http.request(
        "GET",
        path,
        headers={
            "Range": BIG_SPAN,
            "Forestage-Session": stranger.session,
            "Forestage-Counter": "500",
            "Forestage-Wait": "90",
            "Forestage-Mac": mac,
        },
    )
    assert stranger.http.sock.recv(12) == b"HTTP/1.1 206"


def test_chunk_request_beyond_the_upload_limit_gets_503(own_node: Node) -> None:
    """While a client does not read, the next is refused, so that it asks elsewhere."""
    key = grown(own_node)
    with own_node.serving(ONE_UPLOAD):
        slow, other = reads_late(own_node, key), logged_in(own_node, key)
        start_chunk(slow, key)
        assert other.chunk(key, 0, within=BIG_SPAN, wait="0") == 503
        slow.http.close()
        assert other.chunk(key, 0, within=BIG_SPAN, wait="90") == 206


def test_upload_to_a_client_that_stops_reading_is_closed_and_frees_its_slot(own_node: Node) -> None:
    key = grown(own_node)
    brief = ONE_UPLOAD + "server.GRACE, server.SLOWEST = 2.0, 1 << 40\n"
    with own_node.serving(brief):
        slow, other = reads_late(own_node, key), logged_in(own_node, key)
        start_chunk(slow, key)
        start_chunk(other, key)  # its head is enough: all of it might take more than the 2 s too
        other.http.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: n1\r\nX: ",
        b"POST /v1/session HTTP/1.1\r\nHost: n1\r\nContent-Length: 400\r\n\r\nx",
        b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    ],
)
def test_unproven_connection_that_sends_single_bytes_is_closed(own_node: Node, said: bytes) -> None:
    with (
        own_node.serving(
            "from forestage.features.peers import sessions; sessions.PROOF_TIMEOUT = 0.1\n"
        ),
        socket.create_connection(("127.0.0.1", own_node.port), timeout=HANGS) as line,
        contextlib.suppress(ConnectionError),
    ):
        line.sendall(said)
        while line.recv(4096):
            with contextlib.suppress(ConnectionError):
                line.sendall(b"x")


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_idle_connection_of_a_known_client_is_closed_by_the_peer_service(
    own_node: Node, said: bytes
) -> None:
    """Also where a request was begun."""
    key = own_node.publish()
    with own_node.serving(
        "from forestage.features.peers import server; server.CONNECTION_IDLE = 0.1\n"
    ):
        line = logged_in(own_node, key).http.sock
        with contextlib.suppress(ConnectionError):
            line.sendall(said)
            assert line.recv(1) == b""


SLOW_DECODER = """
import sys, time
from pathlib import Path
from forestage.features.peers import auth, server
server.MAX_DECODERS = 1
real = auth.KeyFileAuthenticator.read_credential
def read(self, text):
    print("decodes", file=sys.stderr, flush=True)
    while not Path({go!r}).exists():
        time.sleep(0.01)
    return real(self, text)
auth.KeyFileAuthenticator.read_credential = read
auth.check_authenticator = lambda prover: None
"""


def test_credential_of_a_disconnected_client_is_not_decoded(own_node: Node, tmp_path: Path) -> None:
    """Thousands of them would keep the cluster's own waiting."""
    key, go = own_node.publish(), tmp_path / "go"
    with own_node.serving(SLOW_DECODER.format(go=str(go))):
        lines = [socket.create_connection(("127.0.0.1", own_node.port)) for _ in range(20)]
        for line in lines:
            line.sendall(b"POST /v1/session HTTP/1.1\r\nHost: n1\r\nContent-Length: 1\r\n\r\nx")
        own_node.until_said(b"decodes")
        assert Stranger(own_node.port).is_answered(), "so all of them are being answered"
        for line in lines:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.close()
        known = Stranger(own_node.port)
        assert known.is_answered(), "so it knows that they have gone"
        go.touch()
        assert known.log_in(SHARED, key) == 200
    assert own_node.said.count(b"decodes\n") == 2, "the one it had begun with, and ours"


# --- its life


def test_sigterm_ends_the_peer_service_during_a_wait_and_saves_its_counts(own_node: Node) -> None:
    key = own_node.publish()
    own_node.start()
    client = Client(own_node, key)
    client.fetch(0)
    client.fetch(3)
    with stager(own_node, seed=2) as pid:
        own_node.part(seed=2, pid=pid)
        waiting, whys = Client(own_node, image(2).key), []
        thread = threading.Thread(target=lambda: whys.append(waiting.why(0)))
        thread.start()
        time.sleep(0.3)
        own_node.end()
        thread.join()
    assert whys in (["absent"], ["refused"])
    given = upload_counts.find_upload_counts(own_node.places.peer_counts)
    assert given is not None
    assert (given.chunks, given.bytes) == (2, CHUNK + SIZE - 3 * CHUNK)
    assert own_node.said.decode().count(f"key={key} chunks=2 bytes={given.bytes}") == 1


FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))
"""


def test_peer_service_out_of_descriptors_logs_single_lines_and_serves_again_afterwards(
    own_node: Node,
) -> None:
    """asyncio tries as many connections in a row as its backlog has, with a traceback for each."""
    key = own_node.publish()
    with own_node.serving(FEW_FILES.format(40, 40)):
        with contextlib.ExitStack() as lines:
            for _ in range(200):
                lines.enter_context(socket.create_connection(("127.0.0.1", own_node.port), HANGS))
            for _ in range(2):
                own_node.said = b""
                own_node.until_said(b"Too many open files")
        assert Client(own_node, key).fetch(1) == of_chunk(1)
        assert all(b"peer refused=" in line for line in own_node.said.splitlines())


def test_peer_service_raises_its_file_limit_to_the_hard_limit(own_node: Node) -> None:
    with own_node.serving(FEW_FILES.format(64, 4096)):
        assert own_node.process is not None
        limits = Path(f"/proc/{own_node.process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["4096", "4096"]


def test_client_continues_after_a_restart_of_the_peer_service(own_node: Node) -> None:
    client = Client(own_node, own_node.publish())
    for number in range(2):
        with own_node.serving():
            assert client.fetch(number) == of_chunk(number)


def test_peer_service_exits_6_for_a_taken_port_or_an_open_key_file(own_node: Node) -> None:
    with socket.create_server(("127.0.0.1", own_node.port)):
        code, said = own_node.start_in_vain()
    assert (code, f"port {own_node.port} of 127.0.0.1 is taken by another program" in said) == (
        6,
        True,
    )
    (own_node.places.etc / "peer.key").chmod(0o640)
    code, said = own_node.start_in_vain()
    assert (code, "is not root's with mode 0600" in said) == (6, True)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_peer_sign_is_valid_for_some_seconds_after_the_service_ended(
    own_node: Node, end: signal.Signals
) -> None:
    auto = Config()
    assert not activation.is_on(auto, own_node.places, time.monotonic())
    own_node.start()
    assert own_node.process is not None
    assert stat.S_IMODE(own_node.places.peer_sign.stat().st_mode) == 0o600, (
        "no user can hold its lock"
    )
    os.kill(own_node.process.pid, signal.SIGSTOP)
    later = time.monotonic() + 10 * activation.SIGN_LASTS
    assert activation.is_on(auto, own_node.places, later), "it holds the lock"
    os.kill(own_node.process.pid, signal.SIGCONT)
    own_node.process.send_signal(end)
    own_node.process.communicate()
    ended = time.monotonic()
    assert activation.is_on(auto, own_node.places, ended)
    assert not activation.is_on(auto, own_node.places, ended + activation.SIGN_LASTS)


def test_peer_sign_stays_valid_from_a_kill_until_the_service_restarts(own_node: Node) -> None:
    auto = Config()
    own_node.start()
    for _ in range(2):
        own_node.kill()
        assert activation.is_on(auto, own_node.places, time.monotonic())
        own_node.start()
        later = time.monotonic() + 10 * activation.SIGN_LASTS
        assert activation.is_on(auto, own_node.places, later), "the new one holds the lock"
    own_node.end()


def test_peer_service_recreates_its_deleted_sign(own_node: Node) -> None:
    own_node.start()
    with contextlib.suppress(FileNotFoundError):
        own_node.places.peer_sign.unlink()
    until(lambda: activation.is_on(Config(), own_node.places, time.monotonic()), "the sign")
    own_node.end()


def test_user_cannot_open_or_create_the_peer_sign(own_node: Node) -> None:
    own_node.places.root.chmod(0o755)
    own_node.start()
    own_node.end()
    sign = own_node.places.peer_sign
    assert stat.S_IMODE(sign.parent.stat().st_mode) == 0o711
    made = sign.with_name("another.sign")
    code = "import os, sys; os.open(sys.argv[1], int(sys.argv[2]) | os.O_NONBLOCK, 0o600)"
    for path, flags in ((sign, os.O_RDONLY), (sign, os.O_RDWR), (made, os.O_RDWR | os.O_CREAT)):
        argv = [sys.executable, "-Ic", code, str(path), str(flags)]
        ran = subprocess.run(argv, user=ALICE.uid, capture_output=True, text=True, cwd="/")
        assert "PermissionError" in ran.stderr


def test_peer_service_with_peers_disabled_exits_0_with_one_line(own_node: Node) -> None:
    own_node.configure(enabled=False)
    assert own_node.start_in_vain() == (0, "forestage: peer serves nobody: peers.enabled: false\n")


@pytest.mark.parametrize(("enabled", "code"), [("auto", 0), (True, 6)])
def test_peer_service_without_a_credential_exits_0_with_auto_and_6_with_enabled_true(
    own_node: Node, enabled: bool | str, code: int
) -> None:
    """The unit starts again what fails: AuthType=auth/slurm, and no key is there yet."""
    conf = own_node.places.root / "etc/slurm/slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("AuthType=auth/slurm\n")
    peers = {"enabled": enabled, "port": own_node.port, "listen": "127.0.0.1"}
    config = {"cache": "/nvme/forestage", "peers": peers}
    (own_node.places.etc / "forestage.yaml").write_text(json.dumps(config))
    ended, said = own_node.start_in_vain()
    assert (ended, said.count("\n")) == (code, 1)
    assert "no slurm.key is beside slurm.conf" in said
    assert not own_node.places.peer_sign.exists(), "its hooks ask nobody"


# --- who has proven what


def test_client_records_the_node_that_accepted_its_credential_as_proven(
    node: Node, key: str
) -> None:
    node.places.proven_node.unlink(missing_ok=True)
    Client(node, key).fetch(0)
    noted = proven_node.find_proven_node(node.places)
    assert noted is not None
    assert noted.node == "n1"


def test_peer_service_records_a_proven_client_only_from_another_address(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node's own copies ask it from its own address, and prove nothing."""
    node.places.proven_node.unlink(missing_ok=True)
    name = "ab" * 16
    first(node, 1, name).query()
    assert proven_node.find_proven_node(node.places) is None
    real = socket.socket.connect

    def connect(self: socket.socket, address: tuple[str, int]) -> None:
        self.bind(("127.0.0.2", 0))
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    first(node, 1, name).query()
    noted = proven_node.find_proven_node(node.places)
    assert noted is not None
    assert noted.node == "127.0.0.2"
