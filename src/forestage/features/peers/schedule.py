"""Chunk schedule of a peer-assisted copy: which chunk each worker fetches next, and from where.

Pure: no threads, no I/O, and the time (monotonic seconds) is an argument. The engine
(features/peers/peer_copy.py) calls it under its lock; bench/peers-model drives it with simulated
links.

    state of a chunk       becomes          when
    missing, nobody asked  being read       it is of the own share; or taken over, see below
                           being fetched    a peer has it, or should have it soon
    being read             in               the source gave it
                           missing          the source failed; then nothing more is read here
    being fetched          in               a peer gave it
                           missing          the peer failed, or did not have it
                           asked twice      it takes long, and another peer has it; or it is
                                            overdue, and this node reads it
    asked twice            in               the first of both came; the other ask is obsolete
    in                     missing          its peer gave wrong bytes: it is read
                           (the end)

Chunks that jobs want come first: from a peer that has one, from the source if it is of the own
share, else from the peer that should have it next, whose service tells its copy. Then head, tail
and hot chunks, then what is behind the chunk that a job waited for last, then the lowest.

Own chunks are read from the source, unless a peer turns out to have them. All others come from
peers: each response of a peer says what it has. A chunk that no peer is known to have is waited for
at the neighbour that is nearest to its reader. In four cases a node takes over a chunk that
another one should have read:

    unheard    its reader has not answered its first connection in time, and the own share is asked
               for
    stand in   its reader, and all stand-ins before this node, are out or cannot read; and the own
               share is asked for, or a job waits for the chunk
    overdue    nothing is left to ask, and the chunk takes its reader three times as long as usual
    in need    nothing at all has come for long, or no peer answers: each node reads other chunks,
               one at first, twice as many after each that came

The first two begin at the end of the reader's share: one that begins late, or is slow to answer,
reads from the front.

No read waits for a connection. Until peers could answer, some chunks of the own share are read,
which a late node drops as soon as it hears that others have them.

A copy ahead of a job, for which nobody waits, may have leaders: nodes of other jobs that share the
reading. As long as one of them gets on, it reads nothing.

docs/decisions/0019-three-ways-to-take-over-a-chunk.md says why one rule is not enough.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence, Set
from typing import Literal

import msgspec

from forestage.features.peers.peer_table import (
    PeerTable,
    RunningMedian,
    list_chunk_numbers,
    lowest_chunk,
    make_chunk_set,
)
from forestage.features.peers.ring import SOURCE, NodeRing

FailureReason = Literal["absent", "refused", "silent", "wrong", "slow", "source"]
"""Why a chunk did not come, as connection.PeerRequestError has it.

`source`: the shared file system failed.
"""


class ChunkTransfer(msgspec.Struct, frozen=True):
    """A chunk that one worker is to bring; `peer` is a node's name, or SOURCE."""

    number: int
    peer: str


class SchedulePolicy(msgspec.Struct, frozen=True):
    """How patient a copy is; seconds, and bytes a second.

    `max_own_reads`: own chunks read at the same time. Few: the earlier each is whole, the earlier
    the others can have it. `max_fetches` chunks are to be on their way from peers; fewer, but
    `min_fetches`, where one takes longer than `quick_fetch`: a slow link brings many no sooner, and
    each is given up later.
    """

    max_own_reads: int = 2
    max_fetches: int = 8
    min_fetches: int = 3
    quick_fetch: float = 0.25
    follow_factor: float = 4.0  # times what a slow chunk takes: then a leader does not get on
    max_probe_reads: int = 2  # own chunks read at the same time in the first `probe` seconds
    probe: float = 0.5  # to find out whether others have begun long before
    first_answer_wait: float = 0.4  # for a first connection, before its peer's share is anybody's
    grace: float = 1.0  # for others to begin, before one reads in their stead
    wait: float = 0.5  # at a peer that does not have the chunk yet
    report_interval: float = 0.5  # after which a peer may well have more than it said
    absent_backoff: float = (
        0.2  # before a peer without this copy is asked again; doubles, as the next
    )
    silent_backoff: float = (
        10.0  # before one that sent no byte is asked again, once; then it is left out
    )
    refused_backoff: float = 2.0  # before one that could not be reached is asked again
    lagging_factor: float = (
        4.0  # times the usual duration: then other peers are preferred to that one
    )
    patience: float = 2.0  # without any chunk, before the source is read out of turn
    min_peer_rate: float = 8e6  # of a peer, while it is not known how long a chunk takes
    max_transfer_time: float = 60.0  # of any ask


def limit_fetches(policy: SchedulePolicy, peers: int, reading: int, took: float) -> int:
    """Return how many chunks are to be on their way from peers at once. Pure.

    `reading`: own chunks under way; `took`: what a fetch usually takes, in seconds, 0 before one
    has come. Then a link may be slow, and of many that begin at once each would come late. The more
    peers, the more nodes share the link of each. Chunks that are not read leave room on this node's
    link: with few under way from peers some nodes' links rest while others are shared.
    """
    fewest = max(policy.min_fetches, (peers + 1) // 2) + max(0, policy.max_own_reads - reading)
    room = (
        policy.max_fetches * policy.quick_fetch / max(policy.quick_fetch, took or policy.patience)
    )
    return min(policy.max_fetches, max(fewest, int(room)))


class ChunkSchedule:
    """Which chunks are missing, asked for, in. Sets of chunks are numbers: bit 5 is chunk 5."""

    def __init__(
        self,
        key: str,
        nodes: Sequence[str],
        me: str,
        missing: Iterable[int],
        chunk_bytes: int,
        policy: SchedulePolicy | None = None,
        hot: Sequence[int] = (),
        givers: Sequence[str] = (),
        leaders: Sequence[str] = (),
        silent: Container[str] = (),
    ) -> None:
        """`givers`: nodes of other jobs, which may have all of it.

        They read nothing for this one, unless they are of `nodes` as well; `leaders` are those to
        which this copy leaves reading. `silent` did not answer another copy a short while ago.
        """
        self.ring = NodeRing(key, nodes)
        self.me = me
        self.policy = policy or SchedulePolicy()
        self.transfers: dict[ChunkTransfer, float] = {}  # under way, since when
        self.missing = make_chunk_set(missing)
        self._count = self.missing.bit_length()
        self._unasked = self.missing
        self._early = [1, 1 << self._count >> 1, make_chunk_set(hot)]
        self._urgent = 0  # chunks that jobs wait for
        self._wanted: list[int] = []  # these first, then what jobs will want
        self._front = 0  # where a job waited last: the rest goes on from there
        place = self.ring.index_by_node[me]
        neighbours = list(dict.fromkeys([*givers, *self.ring.list_neighbours(me)]))
        self._share = self.missing & make_chunk_set(range(place, self._count, len(self.ring.nodes)))
        self._due: Counter[str] = Counter()  # by peer, the chunks that should come from it
        for number in list_chunk_numbers(self.missing & ~self._share):
            self._due[self.ring.list_nearer_neighbours(number, me)[0]] |= 1 << number
        self._peers = PeerTable(neighbours, givers, silent)
        self._leaders = leaders
        # Nodes that have begun to copy it a moment ago, or are about to.
        self._beginners = frozenset([*leaders, *self.ring.nodes])
        self._each = max(
            1, self.policy.max_fetches // max(1, len(neighbours))
        )  # asks of one peer at once
        self._sure: set[ChunkTransfer] = set()  # asks of peers that said that they have the chunk
        self._polls: set[ChunkTransfer] = set()  # asks that only want to know what the peer has
        self._early_reads: set[ChunkTransfer] = set()  # begun before peers could answer
        self._turn = place * 7919  # where to look first, so that not all nodes take the same
        self._first_guess = self.policy.patience + chunk_bytes / self.policy.min_peer_rate
        self._follow = self.policy.follow_factor * self._first_guess if leaders else 0.0
        self._usual = RunningMedian()  # of a chunk, wherever it comes from
        self._usual_read = RunningMedian()  # of a chunk that this node reads
        self._usual_fetch = RunningMedian()  # of a chunk that a peer has when it is asked
        self._begun: float | None = None
        self._last_came = 0.0
        self._probe_until = 0.0
        self._out_of_turn = 0  # chunks to read at once because nothing comes; 0 while it does
        self._struck = 0  # chunks that a peer gave wrongly: for the source alone
        self.source_failed = False

    @property
    def is_done(self) -> bool:
        return not self.missing

    def set_wanted(self, now: Sequence[int], soon: Sequence[int]) -> None:
        """Says which chunks jobs wait for, and which they will want, instead of what was said."""
        self._urgent = make_chunk_set(now)
        self._front = now[-1] if now else self._front
        self._wanted = [number for number in (*now, *soon) if self.missing >> number & 1]

    def next_read(self, now: float) -> ChunkTransfer | None:
        """What a worker is to read from the source; None: nothing now."""
        begun = self._ensure_begun(now)
        if self.source_failed:
            return None
        if struck := self._struck & self._unasked:  # nobody but the source is asked for it
            return self._start_transfer(lowest_chunk(struck), SOURCE, now)
        if self._is_leader_reading(now, begun):
            return None
        if self._is_probing(now):
            careful = self._peers.transfer_counts[SOURCE] < self.policy.max_probe_reads
            number = self._pick_own_chunk(now) if careful else None
            if number is None:
                return None
            ask = self._start_transfer(number, SOURCE, now)
            self._early_reads.add(ask)
            return ask
        number = self._pick_own_chunk(now)
        if number is None:
            number = self._pick_late_peers_chunk(now)
        # Others may begin a moment later: a chunk is taken over only after that.
        if number is None and (self._peers.seems_alone or now - begun >= self.policy.grace):
            for choose in (
                self._pick_stand_in_chunk,
                self._pick_overdue_chunk,
                self._pick_out_of_turn_chunk,
            ):
                number = choose(now)
                if number is not None:
                    break
        return None if number is None else self._start_transfer(number, SOURCE, now)

    def next_fetch(self, now: float) -> ChunkTransfer | None:
        """What a worker is to fetch from a peer; None: nothing now."""
        begun = self._ensure_begun(now)
        # Another peer may have a wrong chunk of the first one.
        hidden = 0 if self.source_failed else self._struck & self._unasked
        self._unasked &= ~hidden
        # Over a slow link all that are on their way together take longer than `transfer_timeout`:
        # what came of each is lost then, and its peer is backed off from, in whose stead others
        # read.
        full = len(self.transfers) - self._peers.transfer_counts[SOURCE] >= self._max_fetches()
        ask = self._start_wanted_fetch(now, self._urgent if full else self.missing)
        if ask is None and not full:
            ask = (
                self._start_announced_fetch(now, begun)
                or self._start_expected_fetch(now)
                or self._start_second_fetch(now)
            )
        self._unasked |= hidden
        return ask

    def next_first_connection(self, now: float) -> str | None:
        """A peer to which the first connection is to be made; None: none now."""
        self._ensure_begun(now)
        return self._peers.start_first_connection(now, self.policy.first_answer_wait)

    def mark_connected(self, peer: str) -> None:
        """The peer answered its first connection: it may be asked for chunks."""
        self._peers.end_first_connection(peer)
        self._peers.mark_answered(peer)

    def mark_connect_failed(self, peer: str, why: FailureReason, now: float) -> None:
        """The peer did not answer its first connection, or not as one of our services."""
        self._peers.end_first_connection(peer)
        self._peers.mark_unreachable(peer)
        if why == "wrong":
            self._peers.exclude(peer)
        else:
            self._peers.back_off(peer, self.policy.refused_backoff, now)

    def is_early_read(self, ask: ChunkTransfer) -> bool:
        """Whether the read began before peers could answer, and may turn out to be in vain."""
        return ask in self._early_reads

    def is_superfluous_read(self, ask: ChunkTransfer, now: float) -> bool:
        """Whether an early read is to be dropped: a peer has the chunk."""
        return self.is_early_read(ask) and bool(self._offered_chunks(now) >> ask.number & 1)

    def drop_early_read(self, ask: ChunkTransfer) -> None:
        """An early read was given up: the chunk is missing again."""
        self._end_transfer(ask)

    def transfer_timeout(self, ask: ChunkTransfer) -> float:
        """Seconds after which a worker must abandon this ask."""
        return min(self.policy.max_transfer_time, self._transfer_patience())

    def peer_wait(self, ask: ChunkTransfer) -> float:
        """Seconds that the peer may wait for the chunk, if it does not have it."""
        return 0.0 if ask in self._polls else self.policy.wait

    def record_peer_chunks(
        self, peer: str, has: int, now: float, source_failed: bool = False
    ) -> None:
        """A peer that has the image, or a part of it, said which chunks, and of its source."""
        if not self._peers.has_any_reported:
            self._out_of_turn = 0
        self._peers.record_chunks(peer, has, now, source_failed)

    def mark_received(self, ask: ChunkTransfer, now: float) -> None:
        """The chunk came, and is right."""
        sure = ask in self._sure
        took = now - self._end_transfer(ask)
        if sure and took > self.policy.lagging_factor * self._usual.seconds > 0:
            self._peers.mark_lagging(ask.peer, now + self.policy.patience)
        if self.is_obsolete(ask):
            return
        self.missing &= ~(1 << ask.number)
        self._unasked &= self.missing
        self._last_came = now
        self._usual.add(took)
        if sure:
            self._usual_fetch.add(took)
        if ask.peer == SOURCE:
            self._usual_read.add(took)
            self._out_of_turn = min(2 * self._out_of_turn, self._count)
        else:
            self._out_of_turn = 0
            self._peers.record_delivery(ask.peer, now)

    def mark_failed(self, ask: ChunkTransfer, why: FailureReason, now: float) -> None:
        """The chunk did not come."""
        self._end_transfer(ask)
        has = self._peers.chunks_by_peer.get(ask.peer)
        if why == "slow" and self.is_obsolete(ask):
            return  # it was stopped because the chunk had come
        if why in ("refused", "silent", "wrong"):
            self._peers.mark_unreachable(ask.peer)
        elif why == "absent":
            self._peers.mark_answered(ask.peer)
        if why == "source":
            self.source_failed = True
        elif why == "wrong":
            self._peers.exclude(ask.peer)
        elif why == "silent":
            self._peers.record_silence(ask.peer, self.policy.silent_backoff, now)
        elif why == "refused":
            self._peers.back_off(ask.peer, self.policy.refused_backoff, now)
        elif why == "slow":
            self._peers.back_off(ask.peer, self.policy.patience, now)
        elif has is None or has >> ask.number & 1:  # else it has the copy, but not this chunk yet
            doublings = 2 if ask.peer in self._beginners else 5
            self._peers.back_off(ask.peer, self.policy.absent_backoff, now, doublings)

    def exclude_peer(self, peer: str) -> None:
        """The peer gave wrong bytes: it is asked for nothing more."""
        self._peers.exclude(peer)

    def mark_missing(self, numbers: Iterable[int]) -> None:
        """These chunks came, and may be wrong: they are missing again, and are read."""
        again = make_chunk_set(numbers)
        self.missing |= again
        self._struck |= again
        self._unasked |= again & ~make_chunk_set(ask.number for ask in self.transfers)

    def is_obsolete(self, ask: ChunkTransfer) -> bool:
        """Whether the chunk came by another ask: then the transfer is to be stopped."""
        return not self.missing >> ask.number & 1

    def is_transferred_twice(self, ask: ChunkTransfer) -> bool:
        """Whether the chunk is on its way by another ask too."""
        return any(other.number == ask.number and other != ask for other in self.transfers)

    def is_hopeless(self, now: float) -> bool:
        """Whether the source fails here, and no peer has given anything for long."""
        return self.source_failed and now - self._last_came > self.policy.max_transfer_time / 2

    def _ensure_begun(self, now: float) -> float:
        if self._begun is None:
            self._begun = self._last_came = now
            self._probe_until = now + self.policy.probe if self._peers.neighbours else now
        return self._begun

    def _start_transfer(self, number: int, peer: str, now: float) -> ChunkTransfer:
        ask = ChunkTransfer(number, peer)
        self.transfers[ask] = now
        self._peers.transfer_counts[peer] += 1
        if self._peers.chunks_by_peer.get(peer, 0) >> number & 1:
            self._sure.add(ask)
        self._unasked &= ~(1 << number)
        return ask

    def _end_transfer(self, ask: ChunkTransfer) -> float:
        """Forgets an ask, and returns when it began."""
        since = self.transfers.pop(ask)
        self._peers.transfer_counts[ask.peer] -= 1
        self._polls.discard(ask)
        self._sure.discard(ask)
        self._early_reads.discard(ask)
        if not self.is_transferred_twice(ask):
            self._unasked |= self.missing & 1 << ask.number
        return since

    def _transfer_patience(self) -> float:
        usual = self._usual.seconds
        return max(self.policy.patience, 4 * usual) if usual else self._first_guess

    # From the source

    def _is_probing(self, now: float) -> bool:
        """Whether it is too early to read: peers may turn out to have read everything."""
        enough = min(4, len(self._peers.neighbours))
        return now < self._probe_until and self._peers.count_known() < enough

    def _is_leader_reading(self, now: float, begun: float) -> bool:
        """Whether a leader reads, or may be about to begin."""
        begins = bool(self._leaders) and now - begun < self.policy.grace
        return begins or any(
            self._peers.is_progressing(one, now, self._follow) for one in self._leaders
        )

    def _pick_own_chunk(self, now: float) -> int | None:
        """The first chunk of the own share that no peer has.

        A node that begins late finds that others have read some of its share.
        """
        left = self._unasked & self._share
        # Where nobody answers, nobody has a chunk the earlier for it.
        alone = not self._peers.has_any_answered and not self._is_probing(now)
        most = self._count if alone else self.policy.max_own_reads
        # What a job waits for has a worker of its own.
        over = self._peers.transfer_counts[SOURCE] - most
        if over >= 0:
            left &= 0 if over else self._urgent
        left = left and left & ~self._offered_chunks(now)
        return self._pick_first(left) if left else None

    def _pick_late_peers_chunk(self, now: float) -> int | None:
        """A chunk that no peer has, of one that has not answered yet; after the own share.

        Though a job waits for it: services may all be slow for a moment, and each node would read
        it.
        """
        unheard = self._peers.list_late_peers(now, self.policy.first_answer_wait)
        if not unheard or self._unasked & self._share:
            return None
        out = unheard | self._peers.list_not_reading(now, or_lagging=False)
        return self._pick_chunk_of(unheard, out, now)

    def _pick_stand_in_chunk(self, now: float) -> int | None:
        """A chunk that no peer has and whose reader, and all stand-ins before us, do not read.

        Once all else is asked for, a peer that lags counts as one that is out.
        """
        at_the_end = not self._unasked & self._offered_chunks(now)
        out = self._peers.list_not_reading(now, at_the_end)
        return self._pick_chunk_of(out, out, now)

    def _pick_chunk_of(self, peers: Set[str], out: Container[str], now: float) -> int | None:
        """A chunk of these peers' shares for which this node is the first that is not out."""
        left = self._unasked & ~self._offered_chunks(now)
        if left & self._share:
            left &= self._urgent
        for number in [*self._wanted, *reversed(range(self._count))] if peers and left else ():
            if left >> number & 1 and self.ring.find_reader(number) in peers:
                order = self.ring.list_reader_and_stand_ins(number)
                if next((node for node in order if node not in out), "") == self.me:
                    return number
        return None

    def _pick_overdue_chunk(self, now: float) -> int | None:
        """A chunk that takes its reader long, if this node is the reader or its first stand-in."""
        if self._unasked:
            return None
        # Reading takes a peer as long as us. An ask of a peer that waits for its reader is renewed
        # twice a second and never old, so there silence as a whole is what counts.
        limit = 3 * max(self._usual.seconds, self._usual_read.seconds)
        stuck = now - self._last_came > limit > 0
        for ask in self.transfers if stuck else self._list_slow_transfers(limit, now):
            mine = self.me in self.ring.list_reader_and_stand_ins(
                ask.number, 2
            ) and not self.is_obsolete(ask)
            if mine and ChunkTransfer(ask.number, SOURCE) not in self.transfers:
                return ask.number
        return None

    def _pick_out_of_turn_chunk(self, now: float) -> int | None:
        """Some missing chunk, another one on each node, where nothing has come for long."""
        reading = self._peers.transfer_counts[SOURCE]
        silence = max(self._first_guess, self._transfer_patience(), 4 * self._usual_read.seconds)
        if not self._out_of_turn:
            if self._peers.seems_alone or self._peers.are_peers_out(now):
                self._out_of_turn = self._count
            elif not reading and now - self._last_came > silence:
                self._out_of_turn = 1
        if reading >= self._out_of_turn:
            return None
        left = [
            number
            for number in list_chunk_numbers(self.missing)
            if ChunkTransfer(number, SOURCE) not in self.transfers
        ]
        if not left:
            return None
        return left[self.ring.index_by_node[self.me] * len(left) // len(self.ring.nodes)]

    # From peers

    def _max_fetches(self) -> int:
        """Return how many chunks are now to be on their way from peers at once."""
        neighbours, reading = len(self._peers.neighbours), self._peers.transfer_counts[SOURCE]
        return limit_fetches(self.policy, neighbours, reading, self._usual_fetch.seconds)

    def _start_wanted_fetch(self, now: float, among: int) -> ChunkTransfer | None:
        """A chunk that jobs want, of a peer that has it, or of the one that should have it."""
        offered = self._offered_chunks(now) if self._wanted else 0
        for number in self._wanted:
            if not (self._unasked & among) >> number & 1:
                continue
            if offered >> number & 1:
                peers = list(self._peers.list_others_with(number, self.me, now))
            else:
                peers = [peer for peer in self._peers.neighbours if self._due[peer] >> number & 1]
                peers = [peer for peer in peers if self._may_wait_at(peer, now)]
            # Beside those that it gives us anyway: it does not stand behind them.
            peers = [peer for peer in peers if self._peers.transfer_counts[peer] <= self._each]
            if peers:
                peer = min(
                    peers,
                    key=lambda p: (self._peers.is_lagging(p, now), self._peers.transfer_counts[p]),
                )
                return self._start_transfer(number, peer, now)
        return None

    def _may_wait_at(self, peer: str, now: float) -> bool:
        """Whether to wait for a chunk at this peer; for one at a time."""
        waits = any(ask.peer == peer and ask not in self._sure for ask in self.transfers)
        may_ask = self._peers.is_usable(peer, now) and peer not in self._peers.source_failed
        return may_ask and not waits

    def _pick_first(self, chunks: int) -> int:
        """The one of these chunks to bring first."""
        for number in self._wanted:
            if chunks >> number & 1:
                return number
        ahead = -1 << self._front
        return lowest_chunk(
            next((chunks & one for one in (*self._early, ahead) if chunks & one), chunks)
        )

    def _start_announced_fetch(self, now: float, begun: float) -> ChunkTransfer | None:
        """A chunk that a peer said it has.

        Chunks that should come from that peer go first, so that all peers send alike. A peer
        without news is asked for some chunk, only to learn what it has.
        """
        if not self._unasked:
            return None
        self._turn += 1
        spare: tuple[int, str] | None = None
        for peer in self._by_load():
            if self._peers.transfer_counts[peer] >= self._each or not self._peers.is_usable(
                peer, now
            ):
                continue
            has = self._peers.chunks_by_peer.get(peer, 0) & self._unasked
            due = 0 if self._peers.is_lagging(peer, now) else self._due[peer] & self._unasked
            if has & self._share:  # read in our stead, and others expect it from us
                return self._start_transfer(self._pick_first(has & self._share), peer, now)
            if has & due:
                return self._start_transfer(self._pick_spread(has & due), peer, now)
            # Peers that should give us something are polled often, the others half as often.
            is_giver = peer in self._peers.givers
            asked = is_giver and self._peers.transfer_counts[peer]
            unmet = is_giver and peer not in self._peers.chunks_by_peer
            age = self._peers.seconds_since_report(peer, now, begun)
            if not asked and (unmet or age > self.policy.report_interval * (1 if due else 2)):
                ask = self._start_transfer(self._pick_first(due or self._unasked), peer, now)
                self._polls.add(ask)
                return ask
            # The nodes of a job share what a node of another one has: each gets its own share.
            if has and not asked:
                spare = spare or (self._pick_spread(has), peer)
        return spare and self._start_transfer(*spare, now)

    def _by_load(self) -> list[str]:
        """Return the neighbours, those with the fewest chunks under way first; alike, in turn.

        A link that many share is slow, and would get more and more of our asks.
        """
        neighbours = self._peers.neighbours
        first = self._turn % max(1, len(neighbours))
        turned = [*neighbours[first:], *neighbours[:first]]
        return sorted(turned, key=self._peers.transfer_counts.__getitem__)

    def _offered_chunks(self, now: float) -> int:
        return self._peers.offered_chunks(now, self._follow or self.policy.patience)

    def _pick_spread(self, chunks: int) -> int:
        """One of these chunks; each node another one, so that they have something to exchange."""
        self._turn += 1
        low = self._turn * 40503 % self._count
        above = chunks >> low
        return low + lowest_chunk(above) if above else lowest_chunk(chunks)

    def _start_expected_fetch(self, now: float) -> ChunkTransfer | None:
        """A chunk that no peer is known to have, of the peer that should have it first."""
        found: dict[int, str] = {}
        for peer in self._peers.neighbours if self._unasked else ():
            # One of another job answers at once, and says soon what it has.
            if peer in self._peers.source_failed or peer in self._peers.givers:
                continue
            due = self._unasked & (self._due[peer] | (self._share if self.source_failed else 0))
            if due and not self._peers.transfer_counts[peer] and self._peers.is_usable(peer, now):
                found.setdefault(self._pick_first(due), peer)
        if not found:
            return None
        number = self._pick_first(make_chunk_set(found))
        return self._start_transfer(number, found[number], now)

    def _start_second_fetch(self, now: float) -> ChunkTransfer | None:
        """A chunk that is on its way and takes long, of another peer that has it."""
        for ask in self._list_slow_transfers(1.5 * self._usual.seconds, now):
            if not self.is_transferred_twice(ask):
                for peer in self._peers.list_others_with(ask.number, ask.peer, now):
                    return self._start_transfer(ask.number, peer, now)
        return None

    def _list_slow_transfers(self, limit: float, now: float) -> list[ChunkTransfer]:
        """The asks that are under way for so many seconds, and still wanted."""
        late = [ask for ask, since in self.transfers.items() if now - since > limit > 0]
        return [ask for ask in late if not self.is_obsolete(ask)]
