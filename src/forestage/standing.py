"""What does a copy know of the nodes around it? Who has what, who is busy, whom not to ask now.

Pure; part of supply.py's state. Sets of chunks are numbers: bit 5 is chunk 5.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from forestage.shares import SOURCE

ENOUGH = 8  # peers out of reach are taken for all, as long as none has answered


class Standing:
    """The peers of one copy."""

    def __init__(self, around: Iterable[str]) -> None:
        self.around = list(around)
        self.has: dict[str, int] = {}  # of those that have the copy, or a part of it
        self.load: Counter[str] = Counter()  # asks under way; SOURCE counts as one of them
        self.blind: set[str] = set()  # of those, for whom the source fails
        self._heard: dict[str, float] = {}
        self._out: dict[str, float] = {}  # not to be asked until then
        self._tardy: dict[str, float] = {}
        self._strikes: Counter[str] = Counter()
        self._hung: set[str] = set()
        self._unreached: set[str] = set()
        self._answered = False

    @property
    def alone(self) -> bool:
        """Whether it looks as if no service ran on any of them."""
        return not self._answered and len(self._unreached) >= min(len(self.around), ENOUGH)

    @property
    def any_heard(self) -> bool:
        """Whether one has ever said what it has."""
        return bool(self._heard)

    def unreached(self, peer: str) -> None:
        """It did not answer, or not as one of us."""
        self._unreached.add(peer)

    def answered(self, peer: str) -> None:
        """Its service runs, whether it has begun or not."""
        self._unreached.discard(peer)
        self._answered = True

    def knows(self, peer: str, has: int, now: float, blind: bool) -> None:
        self.answered(peer)
        self.has[peer] = has
        (self.blind.add if blind else self.blind.discard)(peer)
        self._heard[peer] = now

    def quiet(self, peer: str, now: float, begun: float) -> float:
        """Seconds since it said what it has."""
        return now - self._heard.get(peer, begun)

    def met(self) -> int:
        """How many have answered, or turned out not to."""
        return len(self.has.keys() | self._out.keys())

    def rest(self, peer: str, seconds: float, now: float) -> None:
        """Leaves a peer alone; longer from time to time."""
        if not self.resting(peer, now):  # several asks that failed together are one strike
            self._out[peer] = now + seconds * 2 ** min(self._strikes[peer], 5)
            self._strikes[peer] += 1
        self.has.pop(peer, None)

    def gave(self, peer: str) -> None:
        self._strikes.pop(peer, None)
        self._hung.discard(peer)

    def hung(self, peer: str, seconds: float, now: float) -> None:
        """Leaves it alone, and the second time for good.

        Not the first time: where processors are short, all of them may be silent in one moment, and
        whoever left all out would read the whole image.
        """
        if self.resting(peer, now):
            return  # several asks that failed together
        if peer in self._hung:
            self.drop(peer)
        else:
            self._hung.add(peer)
            self.rest(peer, seconds, now)

    def drop(self, peer: str) -> None:
        """Leaves it out for the rest of this copy."""
        self._out[peer] = math.inf
        self.has.pop(peer, None)

    def tardy(self, peer: str, until: float) -> None:
        """It takes much longer than others: what they have too is asked of them."""
        self._tardy[peer] = until

    def is_tardy(self, peer: str, now: float) -> bool:
        return self._tardy.get(peer, -math.inf) > now

    def resting(self, peer: str, now: float) -> bool:
        return self._out.get(peer, -math.inf) > now

    def out(self, now: float, or_tardy: bool) -> set[str]:
        """Those in whose stead others are to read."""
        found = [peer for peer, until in self._out.items() if until > now]
        tardy = [peer for peer in self._tardy if or_tardy and self.is_tardy(peer, now)]
        return {*found, *self.blind, *tardy}

    def seeing(self) -> list[str]:
        """Those for whom the source is not known to fail: who may read what nobody has yet."""
        return [peer for peer in self.around if peer not in self.blind]

    def nobody(self, now: float) -> bool:
        """Whether there is none to ask."""
        return all(self.resting(peer, now) for peer in self.around)

    def offered(self, now: float) -> int:
        """The chunks that somebody has."""
        found = 0
        for peer, has in self.has.items():
            if not self.resting(peer, now):
                found |= has
        return found

    def others_with(self, number: int, peer: str, now: float) -> Iterator[str]:
        """Who has a chunk as well."""
        for other, has in self.has.items():
            if has >> number & 1 and other != peer and not self.resting(other, now):
                yield other

    def reading(self) -> int:
        """Chunks under way from the source."""
        return self.load[SOURCE]


class Usual:
    """How many seconds something takes as a rule: the median, roughly; 0 until it is known."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def took(self, seconds: float) -> None:
        # A step towards each sample, whatever its size: settles where as many lie above as below.
        usual = self.seconds or seconds
        self.seconds = usual * (1.1 if seconds > usual else 1 / 1.1)


def sum_of(numbers: Iterable[int]) -> int:
    """The set of these chunks."""
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


def bits(chunks: int) -> list[int]:
    """The numbers of a set's chunks, in order."""
    found = []
    while chunks:
        found.append(lowest(chunks))
        chunks &= chunks - 1
    return found


def lowest(chunks: int) -> int:
    """The number of a set's first chunk."""
    return (chunks & -chunks).bit_length() - 1
