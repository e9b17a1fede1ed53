"""The order of this node's copies: at most `max_copies` at once, by the time of asking."""

import threading

from forestage.cache.node import Node
from forestage.cache.part import Owner, Part
from forestage.errors import Stopped
from forestage.system import lock

POLL = 0.1  # seconds
STALLED_AFTER = 60.0  # seconds without a chunk, after which a copy gives up its place


def wait_turn(node: Node, key: str, owner: Owner, stop: threading.Event) -> None:
    """Waits until fewer than `max_copies` live stagers of this node asked before this one.

    Raises Stopped.
    """
    while _ahead(node, key, owner) >= node.config.max_copies:
        if stop.wait(POLL):
            raise Stopped


def _ahead(node: Node, key: str, owner: Owner) -> int:
    """Counts the live stagers that come first; a dead one's lock is free.

    One whose source hangs cannot even be killed; it loses its place, or a few of them would keep
    everybody else waiting for ever.
    """
    now = node.clock.wall()
    ahead = 0
    for directory in node.cache.parts.iterdir():
        part = Part(directory)
        other = part.owner()
        if (
            other is not None
            and not _stalled(part, other, now)
            and directory.name != key
            and other.boot == owner.boot
            and (other.since, directory.name) < (owner.since, key)
            and not lock.is_free(node.cache.key_lock(directory.name))
        ):
            ahead += 1
    return ahead


def _stalled(part: Part, owner: Owner, now: float) -> bool:
    return owner.phase == "copying" and part.stood_still(now) > STALLED_AFTER
