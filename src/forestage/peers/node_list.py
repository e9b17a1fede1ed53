"""The nodes that a copy may ask besides those of its job: root's own list, which a sweep writes.

    /run/forestage/nodes.json   the nodes of this node's partitions that are up, and since when

Hooks ask no Slurm, slurm.conf names neither dynamic nor cloud nodes, and the partition of a job or
step must not choose whom root asks: it is the node's own partitions that count. Lists that differ
between nodes only find less.

One question to slurmctld a node and day. Its answer has some 700 bytes for each node: with 10,000
nodes 7 MB, and 8 such answers a minute, at times that the nodes' names spread over some hours.
"""

import zlib
from typing import TYPE_CHECKING

import msgspec

from forestage.paths import Places
from forestage.peers import activation
from forestage.system import folders, records

if TYPE_CHECKING:
    from forestage.cache.node import Node
    from forestage.slurm.queue import NodeState, Slurm

GOOD = 86400.0  # seconds; nobody is asked by an older list
RENEWED = 16 * 3600.0  # seconds, the earliest
SPREAD = 6 * 3600.0  # seconds: some nodes later than others, each before its list is too old
GONE = frozenset(
    ("DOWN", "ERROR", "FAIL", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")
)


class NodeList(msgspec.Struct, frozen=True):
    """nodes.json: names as Slurm has them, sorted; `written` in seconds since the epoch."""

    written: float
    nodes: tuple[str, ...]


def read(places: Places, now: float) -> tuple[str, ...]:
    """The nodes; none where there is no list, or only an old one. Raises OSError."""
    found = records.find(places.nodes, NodeList)
    return found.nodes if found and 0 <= now - found.written <= GOOD else ()


def age(places: Places, now: float) -> float | None:
    """Seconds since the list was written; None: there is none."""
    found = records.find(places.nodes, NodeList)
    return now - found.written if found else None


def write(places: Places, now: float, nodes: tuple[str, ...]) -> None:
    """Replaces the list. Raises OSError."""
    folders.make(places.nodes.parent, folders.PASSABLE)
    records.write(places.nodes, msgspec.json.encode(NodeList(now, tuple(sorted(nodes)))))


def renew(node: "Node", slurm: "Slurm") -> None:
    """Writes the list where it is due. Raises SlurmError, OSError."""
    peers, now = node.config.peers, node.clock.wall()
    is_on = activation.is_on(node.config, node.places, node.clock.monotonic())
    if not is_on or peers.reach != "cluster":
        return
    if not is_due(age(node.places, now), slurm.node):
        return
    write(node.places, now, beside(slurm.all_nodes(), slurm.node))


def is_due(age: float | None, host: str) -> bool:
    """Pure: whether a list of this age, in seconds, is to be written anew."""
    return age is None or not 0 <= age < RENEWED + SPREAD * (zlib.crc32(host.encode()) / (1 << 32))


def beside(nodes: "tuple[NodeState, ...]", host: str) -> tuple[str, ...]:
    """Pure: the nodes that are up and in a partition with this one, itself too; none without it."""
    own = {part for one in nodes if host in (one.name, one.host) for part in one.partitions}
    up = (one for one in nodes if not GONE.intersection(one.states))
    return tuple(one.name for one in up if own.intersection(one.partitions))
