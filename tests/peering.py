"""Peer services on loopback: real processes, each with a root and a port of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from forestage.cache import digest
from forestage.cache.layout import Cache, Entry
from forestage.cache.part import ENTRY_BYTES, Part, PartRecord, boot_id
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.clock import Clock
from forestage.config import Config, ServiceAddress, load_config, parse_address
from forestage.config.keys import PeersSection
from forestage.events import CopyOutcome
from forestage.features.peers import auth, find_peer_client
from forestage.features.peers.auth import Authenticator, Credential, KeyFileAuthenticator
from forestage.features.peers.connection import PeerRequestError
from forestage.features.peers.protocol import ChunkReceiver, ChunkRequest
from forestage.hooks.boundary import HookRun
from forestage.paths import NodePaths
from forestage.stage.chunks import CopyTuning, compute_digests
from forestage.system import lock
from node import ALICE, HANGS, until
from node import Node as Hooks
from node import content as beginning

CHUNK = 1 << 20
COUNT = 4
SIZE = COUNT * CHUNK - 1000  # the last chunk is short
PIECES = 8  # chunks of `data`

SERVE = """
import sys
from pathlib import Path
from forestage.commands.main import main
from forestage.clock import Clock
from forestage.paths import NodePaths
from forestage.commands.command_context import CommandContext
root, munge, node = sys.argv[1:]
main(["peer", "--node", node], obj=CommandContext(NodePaths(Path(root), munge), Clock()))
"""

# Its own nodes are found as `find_at` has it.
FINDS = """
from forestage.config import parse_address
from forestage.config.keys import PeersSection
places, of = {places!r}, PeersSection.node_address
PeersSection.node_address = lambda peers, node: (
    parse_address(places[node], peers.port) if node in places else of(peers, node)
)
"""

# A machine may stand still: clients may wait, or take no bytes, as long as they like.
PATIENT = """
from forestage.features.peers import auth, listen_sockets, server, sessions
server.MAX_CHUNK_WAIT, listen_sockets.USER_TIMEOUT = 99.0, 0
sessions.PROOF_TIMEOUT = server.CONNECTION_IDLE = sessions.SESSION_IDLE = 3600.0
auth.CREDENTIAL_SECONDS, auth.MUNGE_TIMEOUT = 3600, 3600.0
"""

LIVE = "import time, pathlib; pathlib.Path('/proc/self/comm').write_text('forestage-stage')\n"


def image(seed: int = 1) -> SourceImage:
    return SourceImage(
        FileIdentity(f"/lustre/{seed}.sqsh", seed, SIZE, 10, 20), AccessRights(0, 0, 0o644)
    )


def span(number: int) -> tuple[int, int]:
    """Where a chunk begins, and how long it is."""
    return number * CHUNK, min(CHUNK, SIZE - number * CHUNK)


def of_chunk(number: int, seed: int = 1) -> bytes:
    return random.Random(f"{seed}, {number}").randbytes(span(number)[1])


def content(seed: int = 1) -> bytes:
    return b"".join(of_chunk(number, seed) for number in range(COUNT))


def free_port() -> int:
    """A port that is kept: else the kernel may give it to somebody before it is made use of.

    Who is to listen there can, as the service does, with SO_REUSEADDR: nobody listens yet.
    """
    if len(_kept) == KEPT:
        _kept.pop(0).close()
    probe = socket.socket()
    _kept.append(probe)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    return port


_places: dict[str, str] = {}  # HOST:PORT of the nodes of a test
_of = PeersSection.node_address


def find_at(places: Mapping[str, str]) -> None:
    """Has this process, and what it forks, find these nodes there: all of them are one host."""
    _places.update(places)


def _found(peers: PeersSection, node: str) -> ServiceAddress:
    return parse_address(_places[node], peers.port) if node in _places else _of(peers, node)


PeersSection.node_address = _found  # type: ignore[method-assign]

KEPT = 32  # ports; a test has a few
_kept: list[socket.socket] = []


class Node:
    """A node's files, and its service when it is started."""

    def __init__(self, root: Path, name: str = "n1") -> None:
        self.name = name
        self.places = NodePaths(root)
        self.port = free_port()
        self.cache = Cache(root / "nvme/forestage")
        self.cache.prepare(require_mount=False)
        self.process: subprocess.Popen[bytes] | None = None
        self.said = b""
        key_file = self.places.etc / "peer.key"
        key_file.parent.mkdir(parents=True)
        key_file.write_bytes(b"k" * 64)
        key_file.chmod(0o600)
        self.configure()
        assert self.config.peers.enabled

    def configure(self, munge: str = "", **keys: object) -> None:
        """`munge`: the socket to use instead of the key file."""
        self.places = NodePaths(self.places.root, munge)
        peers = {"enabled": True, "port": self.port, "listen": "127.0.0.1", **keys}
        if not munge:
            peers["key_file"] = str(self.places.etc / "peer.key")
        document = {"cache": "/nvme/forestage", "peers": peers}
        (self.places.etc / "forestage.yaml").write_text(json.dumps(document))

    @property
    def config(self) -> Config:
        """From now on its node is found where its service is."""
        find_at({self.name: f"127.0.0.1:{self.port}"})
        return load_config(self.places.etc).config

    def start(self, before: str = "") -> None:
        """`before`: Python that the process runs first, after what makes it patient."""
        argv = [str(self.places.root), self.places.munge, self.name]
        self.process = subprocess.Popen(
            [sys.executable, "-Bc", FINDS.format(places=_places) + PATIENT + before + SERVE, *argv],
            stderr=subprocess.PIPE,
            cwd="/",
        )
        self.said = b""
        self.until_said(b"peer serves at")

    def until_said(self, words: bytes) -> None:
        """Waits for a line of the service's log."""
        assert self.process is not None
        assert self.process.stderr is not None
        while words not in self.said:
            assert select.select([self.process.stderr], [], [], HANGS)[0], self.said.decode()
            more = os.read(self.process.stderr.fileno(), 65536)
            assert more, f"ended: {self.said.decode()}"
            self.said += more

    def end(self) -> None:
        """SIGTERM: the service has ended well."""
        assert self.process is not None
        self.process.terminate()
        _, rest = self.process.communicate(timeout=HANGS)
        self.said += rest
        assert self.process.returncode == 0
        assert b"Traceback" not in self.said, self.said.decode()

    @contextlib.contextmanager
    def serving(self, before: str = "") -> Iterator[None]:
        """As long as it is entered, the service runs; then it ends well."""
        self.start(before)
        try:
            yield
            self.end()
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def start_in_vain(self) -> tuple[int, str]:
        """A service that does not come up: its exit status, and why."""
        argv = [sys.executable, "-Bc", SERVE, str(self.places.root), self.places.munge, self.name]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=HANGS)
        assert "Traceback" not in ran.stderr
        return ran.returncode, ran.stderr

    def publish(self, seed: int = 1, digests: bytes | None = None) -> str:
        """Makes an entry, as a stager leaves it."""
        return self.finish(self.part(seed), seed, digests)

    def finish(self, part: Part, seed: int = 1, digests: bytes | None = None) -> str:
        """All of a copy comes in, and it is published."""
        for number in range(COUNT):
            self.bring(part, number, seed)
        if digests is not None:
            part.map.write_bytes(digests)
        wanted, whole = image(seed), digest.digest_image(part.map.read_bytes())
        entry = Entry(wanted.key, wanted.identity, wanted.access, 1.0, "chunks", CHUNK, whole)
        taken = self.cache.key_lock(wanted.key)  # as a stager does; unless one lives
        with lock.held(taken, 60.0) if lock.is_free(taken) else contextlib.nullcontext():
            self.cache.publish(entry)
        return wanted.key

    def give(self, image: SourceImage, source: Path, chunk: int) -> None:
        """Makes an entry of this file's bytes, whatever the image's are; its digests fit them."""
        entry = self.cache.entry_dir(image.key)
        entry.mkdir(parents=True)
        shutil.copyfile(source, entry / "image")
        tuning = CopyTuning(chunk=chunk)
        (entry / "map").write_bytes(compute_digests(entry / "image", source.stat().st_size, tuning))
        whole = digest.digest_image((entry / "map").read_bytes())
        record = Entry(image.key, image.identity, image.access, 0.0, "chunks", chunk, whole)
        (entry / "entry.json").write_bytes(msgspec.json.encode(record))
        (entry / "used").touch()

    def part(self, seed: int = 1, pid: int = 0, **facts: object) -> Part:
        """A copy under way, of which nothing is in yet."""
        wanted = image(seed)
        part = self.cache.part(wanted.key)
        known = {"chunk": CHUNK, "engine": "chunks", "job": 1, "since": 0.0, **facts}
        part.write_record(PartRecord(pid, boot_id(), wanted, **known))  # type: ignore[arg-type]
        part.image.write_bytes(b"\0" * SIZE)
        part.map.write_bytes(bytes(ENTRY_BYTES * COUNT))
        return part

    def bring(self, part: Part, number: int, seed: int = 1, noted: bytes | None = None) -> None:
        """A chunk comes in; `noted` is what the map says of it."""
        start, _ = span(number)
        data = of_chunk(number, seed)
        with part.image.open("r+b") as file:
            file.seek(start)
            file.write(data)
        with part.map.open("r+b") as file:
            file.seek(number * ENTRY_BYTES)
            file.write(digest.digest_chunk(data) if noted is None else noted)


def data() -> bytes:
    """An image's. Nothing so large is kept: whatever is forked here would take it along."""
    return beginning(1, PIECES * CHUNK)


def give(peer: Node | Hooks, node: Hooks, path: Path, data: bytes) -> None:
    """Has the peer's cache hold `data` for the image, with digests that fit."""
    source = peer.places.root / "given"
    source.write_bytes(data)
    access = AccessRights(ALICE.uid, ALICE.gid, 0o644)
    Node.give(peer, SourceImage(node.identity(path), access), source, CHUNK)  # type: ignore[arg-type]


def run(node: Hooks, environ: dict[str, str]) -> CopyOutcome:
    hook = "step" if "SLURM_STEP_ID" in environ else "prolog"
    HookRun(hook, environ, time.monotonic()).run(node.places, Clock())
    (copied,) = node.outcomes("stager")
    assert isinstance(copied, CopyOutcome)
    return copied


@contextlib.contextmanager
def stager(node: Node, seed: int) -> Iterator[int]:
    """A process that holds the key's lock, as a live stager does; its pid."""
    taken = str(node.cache.key_lock(image(seed).key))
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX)\n"
    argv = [sys.executable, "-Ic", LIVE + code + "print(flush=True); time.sleep(600)", taken]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


class Munged:
    """A munged of the tests' own: its key, its socket, its end."""

    def __init__(self, folder: Path, like: Path | None = None) -> None:
        """`like`: the folder of another one, which has the same key."""
        folder.mkdir(mode=0o755)
        self.socket = folder / "socket"
        key = folder / "key"
        key.write_bytes((like / "key").read_bytes() if like else secrets.token_bytes(128))
        key.chmod(0o600)
        files = {name: folder / name for name in ("pid-file", "log-file", "seed-file")}
        files |= {"key-file": key, "socket": self.socket}
        options = [f"--{name}={path}" for name, path in files.items()]
        self.process = subprocess.Popen(
            ["munged", "--foreground", "--force", *options],
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin"},
        )
        until(self.listens, "munged")

    def listens(self) -> bool:
        """The socket is there a moment before that."""
        assert self.process.poll() is None, (self.socket.parent / "log-file").read_text()
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.socket)) == 0

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


class Client:
    """A copy on another node, which asks n1."""

    def __init__(
        self, node: Node, key: str, nodelist: str = "n[1-2]", munge: str | None = None
    ) -> None:
        places = node.places if munge is None else NodePaths(node.places.root, munge)
        made = find_peer_client(node.config, "n2", nodelist, key, places)
        assert made is not None
        self.peers = made
        self.buffer = memoryview(bytearray(1 << 18))
        self.got: dict[int, bytes] = {}
        self.has: list[int] = []
        self.source_failed = False  # what n1 said last

    def fetch(
        self, number: int, peer: str = "n1", give_up: float = HANGS, wait: float = 5.0
    ) -> bytes:
        """The chunk's bytes. Raises PeerRequestError."""
        pieces: dict[int, bytes] = {}

        def write(at: int, piece: memoryview) -> None:
            pieces[at] = bytes(piece)

        def peer_has(has: int, source_failed: bool) -> None:
            self.has.append(has)
            self.source_failed = source_failed

        start, size = span(number)
        receiver = ChunkReceiver(self.buffer, write, peer_has, lambda: False)
        found = self.peers.fetch_chunk(
            peer, ChunkRequest(number, start, size, give_up, wait), receiver
        )
        data = b"".join(pieces[at] for at in sorted(pieces))
        assert found == digest.digest_chunk(data)
        assert sorted(pieces) == list(range(start, start + size, len(self.buffer)))
        return data

    def why(self, number: int, peer: str = "n1", give_up: float = HANGS, wait: float = 5.0) -> str:
        """Why the chunk does not come."""
        with pytest.raises(PeerRequestError) as caught:
            self.fetch(number, peer, give_up, wait)
        return caught.value.why

    def fetch_to(
        self,
        write: Callable[[int, memoryview], None],
        number: int = 0,
        stop: Callable[[], bool] = lambda: False,
        wait: float = 5.0,
        piece_size: int = 1 << 18,
    ) -> None:
        """Has n1's chunk written piece by piece; `stop` as the copy says it."""
        start, size = span(number)
        buffer = memoryview(bytearray(piece_size))
        receiver = ChunkReceiver(buffer, write, lambda has, source_failed: None, stop)
        self.peers.fetch_chunk("n1", ChunkRequest(number, start, size, HANGS, wait), receiver)


class Stranger:
    """Speaks HTTP to a service as it likes, with a session where it has got one."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.http = http.client.HTTPConnection(host, port, timeout=HANGS)
        self.session = ""
        self.secret = b"guessed"
        self.counter = 0

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        **headers: str,
    ) -> tuple[int, bytes]:
        self.http.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = self.http.getresponse()
        return answer.status, answer.read()

    def is_answered(self) -> bool:
        """Whether the service answers at all."""
        return self.ask("/")[0] == 404

    def log_in(self, prover: Authenticator, key: str) -> int:
        """Gets a session as a client does; the status."""
        return self.send_credential(prover.make_credential(key))

    def send_credential(self, offer: Credential) -> int:
        status, body = self.ask("/v1/session", "POST", offer.text.encode())
        if status == 200:
            self.session, self.secret = json.loads(body)["session"], offer.secret
        return status

    def chunk(
        self,
        key: str,
        number: int | str,
        counter: int | None = None,
        within: str | None = None,
        path: str | None = None,
        wait: str = "0",
        made_for: str = "",
    ) -> int:
        """Asks for a chunk, right except for what is given; the status."""
        self.counter += 1
        mine = self.counter if counter is None else counter
        path = path or f"/v1/chunk/{key}/{number}"
        if within is None:
            start, size = span(int(number) if str(number).isdigit() else 0)
            within = f"bytes={start}-{start + size - 1}"
        mac = auth.request_mac(self.secret, made_for or self.session, "GET", path, within, mine)
        return self.ask(
            path,
            Range=within,
            Forestage_Session=self.session,
            Forestage_Counter=str(mine),
            Forestage_Wait=wait,
            Forestage_Mac=mac,
        )[0]


Answering = Callable[[socket.socket, "Reply"], None]


class FakeService:
    """A service in this process; it knows the key file unless told otherwise.

    `on_chunk` writes the answer to a request for a chunk: (connection, the maker of its reply).
    """

    def __init__(self, on_chunk: Answering, shared: bytes) -> None:
        self.on_chunk = on_chunk
        self.prover = KeyFileAuthenticator(shared)
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
            with contextlib.suppress(auth.BadCredential):
                self.secrets.append(self.prover.read_credential(body).secret)
            name = str(len(self.secrets) - 1)
            mac = auth.session_mac(self.secrets[-1], name)
            send_response(line, "200 OK", json.dumps({"session": name, "mac": mac}).encode())
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
        told: str | None = None,
        length: int = CHUNK,
        secret: bytes | None = None,
    ) -> bytes:
        secret = self.secret if secret is None else secret
        told = digest.digest_chunk(of_chunk(0)).hex() if told is None else told
        mac = auth.response_mac(secret, self.counter, status, has, told, length)
        return (
            f"HTTP/1.1 {status} X\r\nForestage-Has: {has}\r\nForestage-Digest: {told}\r\n"
            f"Forestage-Mac: {mac}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


def send_first_chunk(line: socket.socket, reply: Reply) -> None:
    line.sendall(reply.head() + of_chunk(0))


def send_response(line: socket.socket, status: str, body: bytes) -> None:
    line.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


class OtherNode:
    """Another node that has the whole image, which these are the bytes of."""

    nodes = ("n1", "n2")
    me = "n1"
    givers: tuple[str, ...] = ()
    leaders: tuple[str, ...] = ()

    def __init__(self, content: bytes) -> None:
        self.content = content

    def list_wrong_readers(self) -> frozenset[str]:
        return frozenset()

    def list_silent_nodes(self) -> frozenset[str]:
        return frozenset()

    def open_session(self, peer: str, stop: Callable[[], bool]) -> None:
        """It answers at once."""

    def fetch_chunk(self, peer: str, chunk: ChunkRequest, receiver: ChunkReceiver) -> bytes:
        receiver.on_peer_chunks((1 << 64) - 1, False)
        data = self.content[chunk.start : chunk.start + chunk.size]
        receiver.buffer[: chunk.size] = data
        receiver.write(chunk.start, receiver.buffer[: chunk.size])
        return digest.digest_chunk(data)
