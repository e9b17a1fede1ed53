"""Simulated nodes that run forestage's own ChunkSchedule: what would 10 000 nodes do?

Links: each node sends and receives `link` bytes a second, whatever it has to send in the order of
asking. The source gives `source` bytes a second, the same to each who reads. A dead node does not
answer (1 s until that is noticed), a slow one has a tenth of the link, a late one starts after all
others have begun. A node answers a first connection within ANSWER seconds, `answer` more where its
service is slow.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

from forestage.features.peers import peer_copy
from forestage.features.peers.protocol import HANDSHAKE_TIMEOUT
from forestage.features.peers.ring import SOURCE
from forestage.features.peers.schedule import ChunkSchedule, ChunkTransfer, FailureReason

LATENCY = 0.0005  # seconds, of a question and its answer
ANSWER = 0.02  # seconds: a credential is made and read
SILENCE = 1.0  # seconds until a dead node is taken for one
POLL = 0.25  # seconds between two looks of an idle worker


class PeersCase(NamedTuple):
    """Bytes, bytes a second, seconds; `dead`, `slow`, `late`, `unreadable` are shares of all nodes.

    For those that are unreadable the source fails.
    """

    nodes: int
    chunks: int
    chunk: int
    link: float
    source: float
    dead: float = 0.0
    slow: float = 0.0
    late: float = 0.0
    late_by: float = 0.0
    dies_at: float = 0.0
    unreadable: float = 0.0
    threads: int = 4
    answer: float = 0.0
    spread: float = 0.02


class PeersResult(NamedTuple):
    """`read`: bytes out of the source; seconds from each healthy node's start to its last byte."""

    read: float
    median: float
    late: float  # the 99.9th percentile


class SharedSource:
    """Everybody who reads gets the same share of it, up to a limit of one's own."""

    def __init__(self, world: PeersSimulation, rate: float, limit: float) -> None:
        self.world, self.rate, self.limit = world, rate, limit
        self.flows: list[tuple[float, int, Callable[[], None]]] = []
        self.given = 0.0  # bytes that each flow has got since the beginning
        self.at = 0.0
        self.turn = 0

    def read(self, size: int, then: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self.flows, (self.given + size, next(self.world.numbers), then))
        self._plan()

    def _advance(self) -> None:
        if self.flows:
            share = min(self.limit, self.rate / len(self.flows))
            self.given += (self.world.now - self.at) * share
        self.at = self.world.now

    def _plan(self) -> None:
        self.turn += 1
        if self.flows:
            share = min(self.limit, self.rate / len(self.flows))
            after = max(0.0, self.flows[0][0] - self.given) / share
            self.world.after(after, self._ends, self.turn)

    def _ends(self, turn: int) -> None:
        if turn != self.turn:
            return  # another flow came or went meanwhile, and planned anew
        self._advance()
        while self.flows and self.flows[0][0] <= self.given + 1:
            heapq.heappop(self.flows)[2]()
        self._plan()


class SimulatedPeer:
    """A node with its workers. `free_*`: when its link has sent, or received, all it is to."""

    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate = name, rate
        self.schedule: ChunkSchedule | None = None
        self.dead = self.unreadable = False
        self.begun = 0.0
        self.ended: float | None = None
        self.free_up = self.free_down = 0.0
        self.readers = self.askers = 0  # idle workers
        self.looks = False
        self.reads: dict[ChunkTransfer, float] = {}  # under way at the source, since when
        self.waiting: dict[int, list[tuple[SimulatedPeer, ChunkTransfer, float]]] = {}

    def has(self, number: int) -> bool:
        return self.schedule is not None and not self.schedule.missing >> number & 1


class PeersSimulation:
    """The clock, the nodes, and what happens next."""

    def __init__(self, case: PeersCase, seed: int = 1) -> None:
        self.case = case
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.numbers = iter(range(1 << 62))
        self.read = 0
        self.all = (1 << case.chunks) - 1
        self.names = [f"n{number}" for number in range(case.nodes)]
        self.policy = peer_copy.make_policy(case.threads, case.nodes)
        flows = min(self.policy.max_own_reads, case.threads)
        self.source = SharedSource(self, case.source, case.link / flows)
        self.nodes = {name: SimulatedPeer(name, case.link) for name in self.names}
        self._people(random.Random(seed))

    def _people(self, chance: random.Random) -> None:
        case = self.case
        drawn = list(self.nodes.values())
        chance.shuffle(drawn)
        for node in drawn[: round(case.dead * case.nodes)]:
            self.after(case.dies_at, self._die, node)
        for node in drawn[::-1][: round(case.slow * case.nodes)]:
            node.rate = case.link / 10
        for node in drawn[::-1][: round(case.unreadable * case.nodes)]:
            node.unreadable = True
        late = set(self.names[: round(case.late * case.nodes)])
        for node in drawn:
            # Prologs do not begin in the same instant.
            start = case.late_by if node.name in late else chance.random() * case.spread
            self.after(start, self._start, node)

    def after(self, seconds: float, call: Callable[..., None], *what: object) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), call, what))

    def run(self) -> PeersResult:
        while self.events:
            self.now, _, call, what = heapq.heappop(self.events)
            call(*what)
        healthy = [n for n in self.nodes.values() if not n.dead and n.rate == self.case.link]
        lost = [n.name for n in healthy if n.ended is None]
        if lost:
            raise SystemExit(f"peers-model: {len(lost)} nodes never got all: {lost[:5]}")
        took = sorted(n.ended - n.begun for n in healthy if n.ended is not None)
        return PeersResult(
            read=self.read / (self.case.chunks * self.case.chunk),
            median=took[len(took) // 2],
            late=took[min(len(took) - 1, int(len(took) * 0.999))],
        )

    def _die(self, node: SimulatedPeer) -> None:
        node.dead = True

    def _start(self, node: SimulatedPeer) -> None:
        if node.dead:
            return
        node.begun = self.now
        node.schedule = ChunkSchedule(
            "key", self.names, node.name, range(self.case.chunks), self.case.chunk, self.policy
        )
        node.readers, node.askers = self.case.threads, peer_copy.DOWNLOADS
        if self.case.nodes == 1:
            node.askers = 0
        self._work(node)

    def _work(self, node: SimulatedPeer) -> None:
        """Gives every idle worker something to do."""
        schedule = node.schedule
        if node.dead or schedule is None or node.ended is not None:
            return
        while (name := schedule.next_first_connection(self.now)) is not None:
            peer = self.nodes[name]
            took = HANDSHAKE_TIMEOUT if peer.dead else ANSWER + self.case.answer
            self.after(took, self._greeted, node, peer)
        while node.askers and (ask := schedule.next_fetch(self.now)):
            node.askers -= 1
            self._ask(node, self.nodes[ask.peer], ask)
        while node.readers and (ask := schedule.next_read(self.now)):
            node.readers -= 1
            self._read(node, ask)
        if (node.readers or node.askers) and not node.looks:
            node.looks = True
            self.after(POLL, self._look, node)

    def _greeted(self, node: SimulatedPeer, peer: SimulatedPeer) -> None:
        assert node.schedule is not None
        if peer.dead:
            node.schedule.mark_connect_failed(peer.name, "refused", self.now)
        else:
            node.schedule.mark_connected(peer.name)
        self._work(node)

    def _look(self, node: SimulatedPeer) -> None:
        node.looks = False
        self._work(node)

    def _read(self, node: SimulatedPeer, ask: ChunkTransfer) -> None:
        size = self.case.chunk
        if node.unreadable:
            self.after(LATENCY, self._failed, node, ask, "source")
            return
        self.read += size
        node.free_down = max(node.free_down, self.now) + size / node.rate
        down, since = node.free_down, self.now
        node.reads[ask] = since
        if node.rate < self.case.link:
            self.after(max(LATENCY, down - self.now), self._was_read, node, ask, since)
            return
        self.source.read(
            size,
            lambda: self.after(max(LATENCY, down - self.now), self._was_read, node, ask, since),
        )

    def _was_read(self, node: SimulatedPeer, ask: ChunkTransfer, since: float) -> None:
        if node.reads.get(ask) == since:  # else it was given up
            del node.reads[ask]
            self._got(node, ask)

    def _drop_reads(self, node: SimulatedPeer) -> None:
        """Gives up what turns out to be read in vain; what came of it until then counts."""
        assert node.schedule is not None
        for ask, since in list(node.reads.items()):
            if node.schedule.is_superfluous_read(ask, self.now):
                del node.reads[ask]
                rate = min(self.source.limit, self.source.rate / max(1, len(self.source.flows)))
                came = (self.now - since) * rate
                self.read -= self.case.chunk - min(self.case.chunk, round(came))
                node.schedule.drop_early_read(ask)
                node.readers += 1

    def _ask(self, node: SimulatedPeer, peer: SimulatedPeer, ask: ChunkTransfer) -> None:
        if peer.dead:
            self.after(SILENCE, self._failed, node, ask, "silent")
        elif peer.schedule is None:
            self.after(LATENCY, self._failed, node, ask, "absent")
        elif peer.has(ask.number):
            self._send(node, peer, ask)
        else:
            assert node.schedule is not None
            peer.waiting.setdefault(ask.number, []).append((node, ask, self.now))
            patience = max(LATENCY, node.schedule.peer_wait(ask))
            self.after(patience, self._waited, node, peer, ask, self.now)

    def _waited(
        self, node: SimulatedPeer, peer: SimulatedPeer, ask: ChunkTransfer, since: float
    ) -> None:
        waiting = peer.waiting.get(ask.number)
        if waiting is not None and (node, ask, since) in waiting:
            waiting.remove((node, ask, since))
            self._tell(node, peer)
            self._failed(node, ask, "silent" if peer.dead else "absent")

    def _send(self, node: SimulatedPeer, peer: SimulatedPeer, ask: ChunkTransfer) -> None:
        size = self.case.chunk
        assert node.schedule is not None
        peer.free_up = max(peer.free_up, self.now) + size / peer.rate
        node.free_down = max(node.free_down, self.now) + size / node.rate
        took = max(peer.free_up, node.free_down) - self.now + LATENCY
        self.after(LATENCY, self._tell, node, peer)  # by the head of the answer
        patience = node.schedule.transfer_timeout(ask)
        if took > patience:
            self.after(patience, self._failed, node, ask, "slow")
        else:
            self.after(took, self._got, node, ask, peer)

    def _got(
        self, node: SimulatedPeer, ask: ChunkTransfer, peer: SimulatedPeer | None = None
    ) -> None:
        schedule = node.schedule
        if node.dead or schedule is None:
            return
        if peer is not None and peer.dead:
            self.after(SILENCE, self._failed, node, ask, "silent")
            return
        self._back(node, ask)
        if peer is not None:
            self._tell(node, peer)
        schedule.mark_received(ask, self.now)
        for other, asked, _ in node.waiting.pop(ask.number, ()):
            self._send(other, node, asked)
        if schedule.is_done and node.ended is None:
            node.ended = self.now
        self._work(node)

    def _tell(self, node: SimulatedPeer, peer: SimulatedPeer) -> None:
        """What a peer's answer says besides."""
        if peer.schedule is not None and node.schedule is not None and not peer.dead:
            has = self.all & ~peer.schedule.missing
            node.schedule.record_peer_chunks(peer.name, has, self.now, peer.schedule.source_failed)
            self._drop_reads(node)

    def _failed(self, node: SimulatedPeer, ask: ChunkTransfer, why: FailureReason) -> None:
        if node.schedule is None or node.dead:
            return
        self._back(node, ask)
        node.schedule.mark_failed(ask, why, self.now)
        self._work(node)

    def _back(self, node: SimulatedPeer, ask: ChunkTransfer) -> None:
        if ask.peer == SOURCE:
            node.readers += 1
        else:
            node.askers += 1
