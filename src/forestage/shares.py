"""Who reads which chunk, and whom does a node ask for the others? Pure; all nodes answer alike.

For each image the nodes of a job stand in a ring, in the order of their digests together with its
key (rendezvous hashing). Chunk 0 is read by the first of the ring, chunk 1 by the second, and so on
around. So each reads, and later sends, as much as any other: with an order drawn for each chunk
anew, the unluckiest of 64 nodes had half as much again to send, and everybody waited for it.

A node has others around it that it talks to: those up to SPAN places away in the ring, and those
at a distance of one digit, written in base SPAN. Up to 30 nodes that is everybody; of 10 000 it is
some 70, and a chunk is at most four hops from its reader.
"""

from collections.abc import Sequence
from functools import lru_cache

from forestage.cache import digest

SOURCE = ""
"""Stands for the shared file system where a node's name could stand."""

SPAN = 16  # nodes that ask one node directly, on each side


class Shares:
    """The nodes of one job, around one image."""

    def __init__(self, key: str, nodes: Sequence[str]) -> None:
        self.ring, self.place = _ring(key, tuple(nodes))

    def reader(self, number: int) -> str:
        """Whose share the chunk is."""
        return self.ring[number % len(self.ring)]

    def order(self, number: int, most: int = SPAN) -> list[str]:
        """The chunk's reader, then those who stand in for it, should it be out, each for the last.

        They are the reader's neighbours, so that they notice. From round to round of the ring it is
        another one's turn to be the first of them: what a dead node leaves is shared by many.
        """
        count = len(self.ring)
        turn, first = divmod(number, count)
        others = min(SPAN, count) - 1
        behind = [1 + (turn + step) % others for step in range(others)]
        return [self.ring[(first + step) % count] for step in (0, *behind)][:most]

    def around(self, me: str) -> list[str]:
        """Whom `me` talks to, the nearest before it first."""
        at, count = self.place[me], len(self.ring)
        steps = [digit * worth for worth in _worths(count) for digit in range(1, SPAN)]
        near = [at - step for step in steps if step < count]
        near += [at + step for step in range(1, min(SPAN, count))]
        return [peer for peer in dict.fromkeys(self.ring[at % count] for at in near) if peer != me]

    def nearer(self, number: int, me: str) -> list[str]:
        """Of those around, whom to wait for a chunk with: one digit nearer to its reader."""
        at, count = self.place[me], len(self.ring)
        distance = (at - number) % count
        if count - distance < SPAN:
            return [self.reader(number)]
        digits = [distance // worth % SPAN * worth for worth in _worths(count)]
        return [self.ring[at - digit] for digit in digits if digit]


def _worths(count: int) -> list[int]:
    """What a digit is worth in each place that distances in such a ring have."""
    worths = [1]
    while worths[-1] * SPAN < count:
        worths.append(worths[-1] * SPAN)
    return worths


@lru_cache(2)
def _ring(key: str, nodes: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, int]]:
    ring = tuple(
        sorted(set(nodes), key=lambda node: (digest.of_chunk(f"{key}/{node}".encode()), node))
    )
    return ring, {node: place for place, node in enumerate(ring)}
