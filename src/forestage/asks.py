"""What may a worker of a copy be told to bring, and how patient is it with whom it asks?"""

from typing import Literal

import msgspec

Why = Literal["absent", "refused", "silent", "wrong", "slow", "source"]


class Ask(msgspec.Struct, frozen=True):
    """A chunk that one worker is to bring; `peer` is a node's name, or SOURCE."""

    number: int
    peer: str


class Policy(msgspec.Struct, frozen=True):
    """How patient a copy is; seconds, and bytes a second.

    `at_once`: own chunks read at the same time. Few: the earlier each is whole, the earlier the
    others can have it. `busy` chunks are to be on their way from peers.
    """

    at_once: int = 2
    busy: int = 8
    probe: float = 0.5  # to find out whether others have begun long before
    grace: float = 1.0  # for others to begin, before one reads in their stead
    wait: float = 0.5  # with a peer that does not have the chunk yet
    news: float = 0.5  # after which a peer may well have more than it said
    absent: float = 0.2  # before a peer without this copy is asked again; doubles, as the next
    hung: float = 10.0  # before one that sent no byte is, once; then it is left out
    refused: float = 2.0  # before one that could not be reached is
    tardy: float = 4.0  # times as long as is usual: a peer that others are to be preferred to
    patience: float = 2.0  # without any chunk, before the source is read out of turn
    slowest: float = 8e6  # of a peer, while it is not known how long a chunk takes
    longest: float = 60.0  # of any ask
