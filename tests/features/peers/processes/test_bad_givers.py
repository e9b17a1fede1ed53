"""A copy whose givers die, hang, crawl, spoil, fill up or evict meanwhile: right bytes, few reads.

FORESTAGE_TEST_ROUNDS=500 makes it so many rounds; a round is drawn by its number alone.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from forestage.cache import allocation, digest
from forestage.cache.part import Part
from forestage.cache.source_image import AccessRights, SourceImage, read_identity
from forestage.features.peers import auth, peer_copy
from forestage.features.peers.client import PeerClient
from forestage.features.peers.known_copies import OtherJobsPeers
from forestage.features.peers.protocol import ChunkReceiver, ChunkRequest
from forestage.paths import NodePaths
from forestage.sources.source import ReadableSource
from forestage.stage import source_reader
from forestage.stage.chunks import CopyTuning
from peering import Node

CHUNK = 128 << 10
COUNT = 96
SIZE = COUNT * CHUNK - 5
MOST = 0.15  # of the image: what one copy reads of the source while one good node has all of it
NODES = ("n1", "n2", "n3", "n4")  # a good one, two that will be bad, and who copies

Act = Callable[[Node, SourceImage], None]


class Mishap(NamedTuple):
    """`begin` is done before the copy, `meanwhile` while the node is asked for a chunk."""

    begin: Act
    meanwhile: Act | None = None


class Moment(NamedTuple):
    """At the first chunk that the node is asked for, or at a later one; once it has begun to come,
    or before."""

    ask: int
    answered: bool


def serve(node: Node, image: SourceImage) -> None:
    node.start()


def stay_off(node: Node, image: SourceImage) -> None: ...


def crawl(node: Node, image: SourceImage) -> None:
    """Gives whatever it is asked for, each at its connection's pace."""
    node.configure(bandwidth=CHUNK // 4, reach="cluster")
    turn = "async def turn(*_):\n    return True\n"
    node.start(f"{turn}server.UploadRateLimit.wait_for_turn = turn\n")


def fill_up(node: Node, image: SourceImage) -> None:
    """Gives one chunk; the next one's turn would be in a minute."""
    node.configure(bandwidth=CHUNK // 60, reach="cluster")
    node.start()


def outdate(node: Node, image: SourceImage) -> None:
    """Has the file as it was before."""
    node.cache.image_path(image.key).parent.rename(node.cache.entry_dir("0" * 32))
    node.start()


def kill(node: Node, image: SourceImage) -> None:
    node.kill()


def power_down(node: Node, image: SourceImage) -> None:
    """Who asks gets neither an answer nor an error."""
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)


def spoil(node: Node, image: SourceImage) -> None:
    """In each chunk a byte has turned since it was copied."""
    with node.cache.image_path(image.key).open("r+b") as file:
        for at in range(100, SIZE, CHUNK):
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)


def evict(node: Node, image: SourceImage) -> None:
    node.cache.evict_entry(image.key)
    node.cache.delete_evicted()


MISHAPS = {
    "off": Mishap(stay_off),
    "slow": Mishap(crawl),
    "full": Mishap(fill_up),
    "outdated": Mishap(outdate),
    "killed": Mishap(serve, kill),
    "powered-down": Mishap(serve, power_down),
    "wrong": Mishap(serve, spoil),
    "evicting": Mishap(serve, evict),
}
ROUNDS = int(os.environ.get("FORESTAGE_TEST_ROUNDS", len(MISHAPS)))


class Bad(NamedTuple):
    node: Node
    mishap: Mishap
    moment: Moment


class Watched(PeerClient):
    """The nodes that n4 asks, to some of which something happens meanwhile; of its job, or not."""

    def __init__(self, bad: dict[str, Bad], image: SourceImage, one_job: bool) -> None:
        config = bad["n2"].node.config
        nodes, givers = (NODES, ()) if one_job else (NODES[3:], NODES[:3])
        prover = auth.make_authenticator(config.peers.key_file, NodePaths())
        super().__init__(config, nodes, "n4", image.key, prover, OtherJobsPeers(givers))
        self.bad, self.image = bad, image
        self.asks = {node: itertools.count(1) for node in NODES}

    def fetch_chunk(self, peer: str, chunk: ChunkRequest, receiver: ChunkReceiver) -> bytes:
        bad, ask = self.bad.get(peer), next(self.asks[peer])
        if bad is None or bad.mishap.meanwhile is None or ask != bad.moment.ask:
            return super().fetch_chunk(peer, chunk, receiver)
        happen = bad.mishap.meanwhile
        if not bad.moment.answered:
            happen(bad.node, self.image)
            return super().fetch_chunk(peer, chunk, receiver)

        def says(*said: str) -> None:
            happen(bad.node, self.image)
            receiver.on_digest(*said)

        return super().fetch_chunk(peer, chunk, msgspec.structs.replace(receiver, on_digest=says))


class Site(NamedTuple):
    """The source, and a node that has it and is well."""

    path: Path
    image: SourceImage
    good: Node


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    top = tmp_path_factory.mktemp("site")
    path = top / "source"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as file:
        image = SourceImage(read_identity(file.fileno(), str(path)), AccessRights(0, 0, 0o600))
    good = Node(top / "n1")
    good.give(image, path, CHUNK)
    good.configure(reach="cluster")
    with good.serving():
        yield Site(path, image, good)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the source, read by read. Only who tires of others is in no hurry."""
    found: list[int] = []
    real, policy = source_reader.read_piece, peer_copy.make_policy

    def read_piece(
        source: ReadableSource, start: int, want: memoryview, buffer: memoryview
    ) -> None:
        found.append(len(want))
        real(source, start, want, buffer)

    monkeypatch.setattr(source_reader, "read_piece", read_piece)
    patient = {"max_probe_reads": 0, "probe": 600.0, "grace": 600.0, "patience": 600.0}
    monkeypatch.setattr(
        peer_copy, "make_policy", lambda *of: msgspec.structs.replace(policy(*of), **patient)
    )
    return found


@pytest.mark.ci
@pytest.mark.parametrize("number", range(ROUNDS))
def test_copy_among_failing_givers_has_the_sources_bytes_and_reads_little_of_the_source(
    site: Site, tmp_path: Path, read: list[int], number: int
) -> None:
    turn, first = divmod(number, len(MISHAPS))
    dice, one_job = random.Random(number), (turn + first) % 2 == 0
    names = [list(MISHAPS)[first], dice.choice(list(MISHAPS))]
    bad = {}
    for place, name in zip(("n2", "n3"), names, strict=True):
        node = Node(tmp_path / place, place)
        node.give(site.image, site.path, CHUNK)
        node.configure(reach="cluster")
        bad[place] = Bad(node, MISHAPS[name], Moment(dice.choice((1, 2, 9)), dice.random() < 0.5))
    part = Part(tmp_path / site.image.key)
    part.directory.mkdir()
    try:
        for one in bad.values():
            one.mishap.begin(one.node, site.image)
        with site.path.open("rb") as file:
            source = ReadableSource(file.fileno(), None, SIZE)
            found = allocation.list_data_chunks(file.fileno(), SIZE, CHUNK)
            allocation.reserve_part(part, SIZE, CHUNK, found)
            read.clear()
            tuning, peers = CopyTuning(threads=2, chunk=CHUNK), Watched(bad, site.image, one_job)
            peer_copy.copy_with_peers(source, part, tuning, threading.Event(), peers)
    finally:
        for one in bad.values():
            one.node.kill()
    data = site.path.read_bytes()
    assert part.image.read_bytes() == data, names
    each = (data[at : at + CHUNK] for at in range(0, SIZE, CHUNK))
    assert part.read_digests() == b"".join(map(digest.digest_chunk, each)), names
    assert sum(read) <= MOST * SIZE, (names, sum(read) / SIZE)
