"""What a copy takes whose other nodes refuse, hang or speak otherwise, as a ratio to one without.

One machine, loopback, the stager's own engine. A source that gives `rate` MiB/s to each node. The
nodes besides the one that copies:

    refused   nothing listens there
    dropped   the first packet of a connection is dropped
    mute      a program accepts, and never answers
    stopped   a peer service that SIGSTOP has stopped
    version   a peer service of another protocol
    missing   a web server that knows no such path
    key       a peer service with another key file
    half      every second node refuses; the others copy as well
    healthy   all others copy as well

The cases take turns, and all of them are measured in each round. With --together all nodes copy,
and share one source of `rate` MiB/s: how often it was read, and how long the slowest node took.
`spread` is in how many seconds they begin, `link` the MiB/s that each service sends at most, `burn`
how many processes compute meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests")]

import busy  # noqa: E402
import msgspec  # noqa: E402

from forestage.cache import digest, source_image  # noqa: E402
from forestage.cache.part import PartRecord, boot_id  # noqa: E402
from forestage.cache.source_image import AccessRights, SourceImage  # noqa: E402
from forestage.features.peers import find_peer_client  # noqa: E402
from forestage.features.peers.engine import PeerHelpers  # noqa: E402
from forestage.sources.source import ReadableSource  # noqa: E402
from forestage.stage.chunks import CopyTuning  # noqa: E402
from forestage.stage.engines import ChunkEngine  # noqa: E402
from forestage.system import lock  # noqa: E402
from peering import Node, find_at, free_port  # noqa: E402

MIB = 1 << 20
QUANTUM = 256 << 10  # bytes that one reader gets before the next one has its turn
_fork = multiprocessing.get_context("fork")


class LimitedSource:
    """A file that gives all readers together `rate` bytes a second; it counts them."""

    def __init__(self, path: Path, rate: float) -> None:
        self.path, self.rate = path, rate
        self.fd = os.open(path, os.O_RDONLY)
        self.free_at = _fork.Value(ctypes.c_double, 0.0)
        self.given = _fork.Value(ctypes.c_uint64, 0)

    def read(self, start: int, want: memoryview) -> None:
        for at in range(0, len(want), QUANTUM):
            piece = want[at : at + QUANTUM]
            with self.free_at.get_lock():
                free_at = max(self.free_at.value, time.monotonic()) + len(piece) / self.rate
                self.free_at.value = free_at
            time.sleep(max(0.0, free_at - time.monotonic()))
            os.preadv(self.fd, [piece], start + at)
            with self.given.get_lock():
                self.given.value += len(piece)


class SilentPeersResult(NamedTuple):
    """Seconds of each copy, and images that the source gave."""

    seconds: list[float]
    read: float


class SilentPeersSite:
    """The nodes of one job and the image that they copy."""

    def __init__(self, folder: Path, count: int, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.size, self.chunk = options.mib * MIB, int(options.chunk_mib * MIB)
        self.file = folder / "source"
        with self.file.open("wb") as file:
            for _ in range(options.mib):
                file.write(random.randbytes(MIB))
        fd = os.open(self.file, os.O_RDONLY)
        self.image = SourceImage(
            source_image.read_identity(fd, str(self.file)), AccessRights(0, 0, 0o600)
        )
        self.digests = [
            digest.digest_chunk(os.pread(fd, self.chunk, at))
            for at in range(0, self.size, self.chunk)
        ]
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.tuning = CopyTuning(threads=options.threads, chunk=self.chunk)
        self.runs = 0

    def node(self, name: str) -> Node:
        self.runs += 1
        node = Node(self.folder / f"{name}-{self.runs}", name)
        keys = {"bandwidth": int(self.options.link * MIB)} if self.options.link else {}
        node.configure(**keys)
        return node

    @contextlib.contextmanager
    def serving(self, nodes: Sequence[Node], before: str = "") -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for node in nodes:
                undo.callback(shutil.rmtree, node.places.root, ignore_errors=True)
                undo.callback(node.kill)
                node.start(before)
            yield

    def copy(self, node: Node, source: LimitedSource, peers: bool) -> float:
        """Copies as a stager does, and returns the seconds that it took."""
        content = ReadableSource(source.fd, None, self.size, str(self.file), read=source.read)
        part = node.cache.part(self.image.key)
        engine = ChunkEngine(self.tuning)
        about = self.chunk, "chunks", 1, 0.0
        with lock.held(node.cache.key_lock(self.image.key), 5.0):
            start = time.monotonic()
            part.write_record(PartRecord(os.getpid(), boot_id(), self.image, *about))
            engine.reserve(content, part)
            names = ",".join(self.names)
            config = msgspec.structs.replace(node.config, chunk_size=self.chunk)
            key = self.image.key
            made = find_peer_client(config, node.name, names, key, node.places) if peers else None
            helpers = PeerHelpers(made) if made else None
            engine.copy(content, part, threading.Event(), helpers)
            seconds = time.monotonic() - start
        sums = [digest.digest_chunk(one) for one in self._chunks(part.image)]
        assert sums == self.digests, "wrong bytes"
        return seconds

    def _chunks(self, file: Path) -> Iterator[bytes]:
        with file.open("rb") as opened:
            while piece := opened.read(self.chunk):
                yield piece

    def copies(
        self, nodes: Sequence[Node], shared: bool, spread: float, peers: bool
    ) -> SilentPeersResult:
        """Has these nodes copy at the same time, each in a process of its own."""
        rate = self.options.rate * MIB
        one = LimitedSource(self.file, rate)
        sources = [one if shared else LimitedSource(self.file, rate) for _ in nodes]
        ends = [os.pipe() for _ in nodes]
        pids = []
        for number, (node, source, (_, end)) in enumerate(zip(nodes, sources, ends, strict=True)):
            late = spread * number / max(1, len(nodes) - 1)
            pids.append(_fork_work(self._report, node, source, peers, end, late))
            os.close(end)
        seconds = []
        for begin, _ in ends:
            with os.fdopen(begin) as said:
                seconds.append(float(said.read() or "nan"))
        for pid in pids:
            os.waitpid(pid, 0)
        given = one.given.value if shared else sum(source.given.value for source in sources)
        for source in {id(source): source for source in sources}.values():
            os.close(source.fd)
        return SilentPeersResult(seconds, given / self.size)

    def _report(
        self, node: Node, source: LimitedSource, peers: bool, end: int, late: float
    ) -> None:
        time.sleep(late)
        os.write(end, f"{self.copy(node, source, peers):.3f}".encode())


Case = Callable[[SilentPeersSite], contextlib.AbstractContextManager[list[Node]]]


@contextlib.contextmanager
def start_without_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    with _copier(site) as node:
        yield [node]


@contextlib.contextmanager
def start_refusing_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    with _at_one_port(site, free_port()) as nodes:
        yield nodes


@contextlib.contextmanager
def start_dropping_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(4):  # what the queue has room for, and more
            one = undo.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        yield undo.enter_context(_at_one_port(site, port))


@contextlib.contextmanager
def start_mute_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        yield undo.enter_context(_at_one_port(site, listener.getsockname()[1]))


@contextlib.contextmanager
def start_stopped_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    other = site.node("n2")
    with site.serving([other]):
        assert other.process is not None
        other.process.send_signal(signal.SIGSTOP)
        with _at_one_port(site, other.port) as nodes:
            yield nodes


@contextlib.contextmanager
def start_other_version_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    other = site.node("n2")
    before = "auth.PROTOCOL = 'forestage-0'\n"
    with site.serving([other], before), _at_one_port(site, other.port) as nodes:
        yield nodes


@contextlib.contextmanager
def start_peers_without_image(site: SilentPeersSite) -> Iterator[list[Node]]:
    port = free_port()
    argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.05)
            with _at_one_port(site, port) as nodes:
                yield nodes
        finally:
            server.kill()


@contextlib.contextmanager
def start_peers_with_other_key(site: SilentPeersSite) -> Iterator[list[Node]]:
    other = site.node("n2")
    (other.places.etc / "peer.key").write_bytes(b"x" * 64)
    with site.serving([other]), _at_one_port(site, other.port) as nodes:
        yield nodes


@contextlib.contextmanager
def start_half_of_the_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    nodes = [site.node(name) for name in site.names[::2]]
    closed = free_port()
    find_at(dict.fromkeys(site.names[1::2], f"127.0.0.1:{closed}"))
    find_at({node.name: f"127.0.0.1:{node.port}" for node in nodes})
    with site.serving(nodes):
        yield nodes


@contextlib.contextmanager
def start_healthy_peers(site: SilentPeersSite) -> Iterator[list[Node]]:
    nodes = [site.node(name) for name in site.names]
    find_at({node.name: f"127.0.0.1:{node.port}" for node in nodes})
    with site.serving(nodes):
        yield nodes


CASES: dict[str, Case] = {
    "off": start_without_peers,
    "refused": start_refusing_peers,
    "dropped": start_dropping_peers,
    "mute": start_mute_peers,
    "stopped": start_stopped_peers,
    "version": start_other_version_peers,
    "missing": start_peers_without_image,
    "key": start_peers_with_other_key,
    "half": start_half_of_the_peers,
    "healthy": start_healthy_peers,
}


@contextlib.contextmanager
def _copier(site: SilentPeersSite) -> Iterator[Node]:
    node = site.node(site.names[0])
    try:
        yield node
    finally:
        shutil.rmtree(node.places.root, ignore_errors=True)


@contextlib.contextmanager
def _at_one_port(site: SilentPeersSite, port: int) -> Iterator[list[Node]]:
    """The node that copies; all others are found at this port."""
    find_at(dict.fromkeys(site.names[1:], f"127.0.0.1:{port}"))
    with _copier(site) as node:
        yield [node]


def _fork_work(work: Callable[..., None], *what: object) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(*what)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


@contextlib.contextmanager
def _burn_processors(count: int) -> Iterator[None]:
    def burn() -> None:
        while True:
            pass

    pids = [_fork_work(burn) for _ in range(count)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def print_cases_alone(site: SilentPeersSite, names: Sequence[str], rounds: int) -> str:
    """Print each case as a ratio to `off` of the same rounds, and return the worst one's."""
    took: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            with CASES[name](site) as nodes:
                result = site.copies(nodes, shared=False, spread=0.0, peers=name != "off")
                took[name].append(max(result.seconds))
    print(f"| nodes {len(site.names)} | median s | range | : off | + s |")
    print("|:--" + "|--:" * 4 + "|")
    base = statistics.median(took["off"])
    for name, seconds in took.items():
        middle = statistics.median(seconds)
        print(
            f"| {name} | {middle:.2f} | {min(seconds):.2f}-{max(seconds):.2f}"
            f" | {middle / base:.2f} | {middle - base:+.2f} |",
            flush=True,
        )
    worst = max(statistics.median(took[name]) for name in names if name != "healthy")
    return f"worst{len(site.names)}={worst / base:.2f}"


def print_copies_together(site: SilentPeersSite, options: argparse.Namespace) -> str:
    """Print what each round took and read, and return the most that was read with peers."""
    most = 0.0
    for number in range(options.rounds):
        for peers in (False, True):
            with start_healthy_peers(site) as nodes, _burn_processors(options.burn):
                result = site.copies(nodes, shared=True, spread=options.spread, peers=peers)
            said = " ".join(f"{one:.2f}" for one in result.seconds)
            print(
                f"{number} nodes={len(nodes)} peers={peers} read={result.read:.3f}"
                f" slowest={max(result.seconds):.2f} each={said}",
                flush=True,
            )
            most = max(most, result.read if peers else 0.0)
    return f"read{len(site.names)}={most:.3f}"


def main() -> None:
    parser = busy.BenchOptions("peers-silent", __doc__, "5 minutes")
    parser.add_argument("--nodes", default="2,8")
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--chunk-mib", type=float, default=4)
    parser.add_argument("--rate", type=float, default=32, help="of the source, MiB/s")
    parser.add_argument("--link", type=float, default=0, help="of each service, MiB/s")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--burn", type=int, default=0)
    options, load = parser.begin(), busy.MachineLoad()
    figures = []
    for count in map(int, options.nodes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            site = SilentPeersSite(Path(folder), count, options)
            names = options.cases.split(",")
            figures.append(
                print_copies_together(site, options)
                if options.together
                else print_cases_alone(site, names, options.rounds)
            )
    print(load.last(" ".join(figures)))


if __name__ == "__main__":
    main()
