"""Ring of a job's nodes for one image: which node reads which chunk, and which nodes talk.

The nodes are in the order of their digests together with the image's key (rendezvous hashing).
Chunk 0 is read by the first node of the ring, chunk 1 by the second, and so on around. So each
node reads, and later sends, as much as any other: with an order drawn anew for each chunk, the
unluckiest of 64 nodes had half as much again to send, and everybody waited for it.

The neighbours of a node are those up to SPAN places away in the ring, and those at a distance of
one digit, written in base SPAN. Up to 30 nodes that is everybody; of 10 000 it is some 70, and a
chunk is at most four hops from its reader.

Pure. All nodes must come to the same result: what is changed here changes the protocol.
"""

from collections.abc import Sequence
from functools import lru_cache

from forestage.cache import digest

SOURCE = ""
"""The shared file system, where a node's name could stand."""

SPAN = 16  # places in the ring, on each side


class NodeRing:
    """The nodes of one job, for one image. `index_by_node` is each node's index in `nodes`."""

    def __init__(self, key: str, nodes: Sequence[str]) -> None:
        self.nodes, self.index_by_node = _order_nodes(key, tuple(nodes))

    def find_reader(self, number: int) -> str:
        """The node that reads the chunk from the shared file system."""
        return self.nodes[number % len(self.nodes)]

    def list_reader_and_stand_ins(self, number: int, most: int = SPAN) -> list[str]:
        """The chunk's reader, then its stand-ins: each reads the chunk if all before it are out.

        They are neighbours of the reader, so that they notice. Another one is the first of them in
        each round of the ring, so that many share what a dead node leaves.
        """
        count = len(self.nodes)
        turn, first = divmod(number, count)
        others = min(SPAN, count) - 1
        behind = [1 + (turn + step) % others for step in range(others)]
        return [self.nodes[(first + step) % count] for step in (0, *behind)][:most]

    def list_neighbours(self, me: str) -> list[str]:
        """The nodes that `me` talks to, the nearest before it first."""
        at, count = self.index_by_node[me], len(self.nodes)
        steps = [digit * worth for worth in _place_values(count) for digit in range(1, SPAN)]
        near = [at - step for step in steps if step < count]
        near += [at + step for step in range(1, min(SPAN, count))]
        return [peer for peer in dict.fromkeys(self.nodes[at % count] for at in near) if peer != me]

    def list_nearer_neighbours(self, number: int, me: str) -> list[str]:
        """The neighbours from which a chunk should come: one digit nearer to its reader."""
        at, count = self.index_by_node[me], len(self.nodes)
        distance = (at - number) % count
        if count - distance < SPAN:
            return [self.find_reader(number)]
        digits = [distance // worth % SPAN * worth for worth in _place_values(count)]
        return [self.nodes[at - digit] for digit in digits if digit]


def _place_values(count: int) -> list[int]:
    """The powers of SPAN that distances in a ring of `count` nodes have digits for."""
    worths = [1]
    while worths[-1] * SPAN < count:
        worths.append(worths[-1] * SPAN)
    return worths


@lru_cache(2)
def _order_nodes(key: str, nodes: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, int]]:
    ring = tuple(
        sorted(set(nodes), key=lambda node: (digest.digest_chunk(f"{key}/{node}".encode()), node))
    )
    return ring, {node: place for place, node in enumerate(ring)}
