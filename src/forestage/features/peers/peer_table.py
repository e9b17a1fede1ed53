"""Peer table of a copy: which chunks each neighbour has, how busy it is, whom not to ask now.

Pure, a part of schedule.py's state. Sets of chunks are numbers: bit 5 is chunk 5. Times are
monotonic seconds.

    state          after                              until
    not greeted    (at first)                         it answers its first connection; see below
    usable         it answered
    backed off     refused, slow, absent, silent      2 to 32 times the seconds of that kind
    left out       wrong bytes; silent once more      the copy ends
    lagging        much slower than other peers       some seconds; asked only for what no other has
    source failed  it said so                         it says otherwise; it is still asked

A peer that is backed off or left out is `out`, and so is, for reading, one whose source failed.

The first connection to a peer, its greeting, stands beside all else: nothing is asked of a peer
before it has answered. One that answers late, or does not, is `unheard`, and so is at once one
that another copy has found silent. All of them are greeted: they may have been slow for a moment.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator

# If this many peers are unreachable and none ever answered, no service is taken to run anywhere.
ENOUGH_UNREACHABLE = 8

MAX_FIRST_CONNECTIONS = 16  # at once, apart from those that take long


class PeerTable:
    """The neighbours of one node, for one copy."""

    def __init__(
        self,
        neighbours: Iterable[str],
        givers: Iterable[str] = (),
        silent: Container[str] = (),
    ) -> None:
        """`givers` are the neighbours that are of another job, `silent` those that were silent."""
        self.neighbours = list(neighbours)
        self.givers = frozenset(givers)
        self._was_silent = {peer for peer in self.neighbours if peer in silent}
        self._greeted: set[str] = set()
        self._greetings: dict[str, float] = {}  # under way, since when
        self._first_greeting: dict[str, float] = {}
        self._gave_at: dict[str, float] = {}
        self._grew_at: dict[str, float] = {}  # when it last said that it has more
        self.chunks_by_peer: dict[
            str, int
        ] = {}  # chunks of those that have the image or a part of it
        self.transfer_counts: Counter[str] = Counter()  # asks under way; SOURCE has an entry too
        self.source_failed: set[str] = set()
        self._heard: dict[str, float] = {}  # when it last said what it has
        self._out: dict[str, float] = {}  # not to be asked until then
        self._lagging: dict[str, float] = {}
        self._strikes: Counter[str] = Counter()  # failures since it last gave a chunk
        self._hung: set[str] = set()
        self._unreached: set[str] = set()
        self._answered = False

    @property
    def seems_alone(self) -> bool:
        """Whether no service seems to run on any of them."""
        return not self._answered and len(self._unreached) >= min(
            len(self.neighbours), ENOUGH_UNREACHABLE
        )

    @property
    def has_any_reported(self) -> bool:
        """Whether one has ever said what it has."""
        return bool(self._heard)

    @property
    def has_any_answered(self) -> bool:
        """Whether one has ever answered."""
        return bool(self._greeted)

    def start_first_connection(self, now: float, patience: float) -> str | None:
        """Return a peer to connect to for the first time, and note that this has begun."""
        fresh = sum(now - since <= patience for since in self._greetings.values())
        if fresh >= MAX_FIRST_CONNECTIONS:
            return None
        left = (
            peer
            for peer in self.neighbours
            if not (peer in self._greeted or peer in self._greetings or self.is_out(peer, now))
        )
        # Those that were silent come last: their connections will take long.
        peer = min(left, key=self._was_silent.__contains__, default=None)
        if peer is not None:
            self._greetings[peer] = now
            self._first_greeting.setdefault(peer, now)
        return peer

    def end_first_connection(self, peer: str) -> None:
        """Note that the first connection has ended, well or not."""
        self._greetings.pop(peer, None)

    def list_late_peers(self, now: float, patience: float) -> set[str]:
        """Return the peers that have not answered, and are not to be waited for any more."""
        return {
            peer
            for peer in self.neighbours
            if peer not in self._greeted
            and (
                peer in self._was_silent
                or peer in self._unreached
                or now - self._first_greeting.get(peer, now) > patience
            )
        }

    def is_usable(self, peer: str, now: float) -> bool:
        """Whether something may be asked of it now."""
        return peer in self._greeted and not self.is_out(peer, now)

    def mark_unreachable(self, peer: str) -> None:
        """Notes that it did not answer, or not as one of our services."""
        self._unreached.add(peer)

    def mark_answered(self, peer: str) -> None:
        """Notes that its service runs, whether its copy has begun or not."""
        self._unreached.discard(peer)
        self._greeted.add(peer)
        self._answered = True

    def record_chunks(self, peer: str, has: int, now: float, source_failed: bool) -> None:
        """Notes which chunks it has, and whether its source fails."""
        self.mark_answered(peer)
        if has & ~self.chunks_by_peer.get(peer, 0):
            self._grew_at[peer] = now
        self.chunks_by_peer[peer] = has
        (self.source_failed.add if source_failed else self.source_failed.discard)(peer)
        self._heard[peer] = now
        self._gave_at.setdefault(peer, now)
        self._grew_at.setdefault(peer, now)

    def seconds_since_report(self, peer: str, now: float, begun: float) -> float:
        """Seconds since it last said what it has, or since the copy began."""
        return now - self._heard.get(peer, begun)

    def count_known(self) -> int:
        """How many have said what they have, or turned out to be out."""
        return len(self.chunks_by_peer.keys() | self._out.keys())

    def back_off(self, peer: str, seconds: float, now: float, doublings: int = 5) -> None:
        """Does not ask it for so many seconds; twice as many each time, so often at most."""
        if not self.is_out(peer, now):  # several asks that failed together are one failure
            self._out[peer] = now + seconds * 2 ** min(self._strikes[peer], doublings)
            self._strikes[peer] += 1
        self.chunks_by_peer.pop(peer, None)

    def record_delivery(self, peer: str, now: float) -> None:
        """Notes that a chunk of it came: its failures are forgotten."""
        self._gave_at[peer] = now
        self._strikes.pop(peer, None)
        self._hung.discard(peer)

    def record_silence(self, peer: str, seconds: float, now: float) -> None:
        """Backs off from a peer that was silent; the second time it is left out.

        Not the first time: where processors are short all peers may be silent in one moment, and a
        copy that left all of them out would read the whole image.
        """
        if self.is_out(peer, now):
            return  # several asks that failed together are one failure
        if peer in self._hung:
            self.exclude(peer)
        else:
            self._hung.add(peer)
            self.back_off(peer, seconds, now)

    def exclude(self, peer: str) -> None:
        """Does not ask it any more during this copy."""
        self._out[peer] = math.inf
        self.chunks_by_peer.pop(peer, None)

    def mark_lagging(self, peer: str, until: float) -> None:
        """Notes that it is much slower than others, which are preferred until then."""
        self._lagging[peer] = until

    def is_lagging(self, peer: str, now: float) -> bool:
        return self._lagging.get(peer, -math.inf) > now

    def is_out(self, peer: str, now: float) -> bool:
        return self._out.get(peer, -math.inf) > now

    def list_not_reading(self, now: float, or_lagging: bool) -> set[str]:
        """The peers in whose stead others read."""
        out = [peer for peer, until in self._out.items() if until > now]
        lagging = [peer for peer in self._lagging if or_lagging and self.is_lagging(peer, now)]
        return {*out, *self.source_failed, *lagging}

    def are_peers_out(self, now: float) -> bool:
        """Whether there is no peer to ask."""
        return all(self.is_out(peer, now) for peer in self.neighbours)

    def offered_chunks(self, now: float, patience: float) -> int:
        """The chunks that at least one peer has.

        A node of another job counts as long as something comes from it, `patience` seconds: this
        job has not chosen it, and is not to wait for it.
        """
        found = 0
        for peer, has in self.chunks_by_peer.items():
            slow = peer in self.givers and now - self._gave_at[peer] > patience
            if not (slow or self.is_out(peer, now)):
                found |= has
        return found

    def is_progressing(self, peer: str, now: float, patience: float) -> bool:
        """Whether it copies, and had a chunk more within `patience` seconds."""
        failed = self.is_out(peer, now) or peer in self.source_failed
        return peer in self.chunks_by_peer and not failed and now - self._grew_at[peer] <= patience

    def list_others_with(self, number: int, peer: str, now: float) -> Iterator[str]:
        """The other peers that have the chunk."""
        for other, has in self.chunks_by_peer.items():
            if has >> number & 1 and other != peer and not self.is_out(other, now):
                yield other


class RunningMedian:
    """Running median of durations, roughly; `seconds` is 0 without any."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        # A step of 10 % towards each sample: it settles where as many are above as below.
        before = self.seconds or seconds
        self.seconds = before * (1.1 if seconds > before else 1 / 1.1)


def make_chunk_set(numbers: Iterable[int]) -> int:
    """The set of these chunks."""
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


def list_chunk_numbers(chunks: int) -> list[int]:
    """The numbers of a set's chunks, in order."""
    found = []
    while chunks:
        found.append(lowest_chunk(chunks))
        chunks &= chunks - 1
    return found


def lowest_chunk(chunks: int) -> int:
    """The number of a set's first chunk."""
    return (chunks & -chunks).bit_length() - 1
