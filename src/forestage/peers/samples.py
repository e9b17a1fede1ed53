"""Which pieces of what peers give are compared with the source. Pure, but for the dice.

A digest proves only that the bytes came as they are on the peer. A peer that once read wrongly, or
lies, is found by reading a few pieces of its chunks from the source as well. All nodes of a job
together read no more than SHARE of the image for that; no more than OUTSIDE where nodes of other
jobs help, since one job after the other reads as much. The pieces are as many, and smaller.
"""

from collections.abc import Mapping, Sequence
from random import Random

SHARE = 0.02  # of the image's bytes, for all nodes of a job
OUTSIDE = 0.005
PIECES = 64  # of one copy; the more, the smaller
SMALLEST, LARGEST = 4 * 1024, 64 * 1024  # bytes of one, a power of two

Span = tuple[int, int]  # where in the image a piece begins, and how long it is; bytes


def draw(
    numbers: Sequence[int], size: int, chunk: int, nodes: int, dice: Random, outside: bool = False
) -> Mapping[int, list[Span]]:
    """Returns the pieces by the number of their chunk; `numbers` are the chunks that are missing.

    `size` and `chunk` in bytes; `outside`: nodes of other jobs help. No peer may be able to foresee
    them: `dice` is SystemRandom.
    """
    found: dict[int, list[Span]] = {}
    budget = size * (OUTSIDE if outside else SHARE) / nodes
    length = SMALLEST
    while length < min(LARGEST, chunk) and 2 * length * PIECES <= budget:
        length *= 2
    # Where it is not enough for one, some nodes have one: together no more than SHARE on average.
    count = int(min(PIECES, budget / length + dice.random() * (budget < length)))
    for number in dice.choices(numbers, k=count) if numbers else ():
        start = number * chunk
        within = min(chunk, size - start)
        at = start + dice.randrange(-(-within // length)) * length
        found.setdefault(number, []).append((at, min(length, start + within - at)))
    return found
