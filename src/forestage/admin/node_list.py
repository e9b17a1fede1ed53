"""The list of nodes that copies may ask besides their job's: a sweep writes it, from Slurm's word.

One question to slurmctld a node and day. Its answer has some 700 bytes for each node: with 10,000
nodes 7 MB, and 8 such answers a minute, at times that the nodes' names spread over some hours.
"""

import zlib

from forestage.cache.node import Node
from forestage.peers import node_list
from forestage.slurm.queue import NodeState, Slurm

RENEWED = 16 * 3600.0  # seconds, the earliest
SPREAD = 6 * 3600.0  # seconds: some nodes later than others, each before its list is too old
GONE = frozenset(
    ("DOWN", "ERROR", "FAIL", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")
)


def renew(node: Node, slurm: Slurm) -> None:
    """Writes the list where it is due. Raises SlurmError, OSError."""
    peers, now = node.config.peers, node.clock.wall()
    if not peers.enabled or peers.reach != "cluster":
        return
    if not is_due(node_list.age(node.places, now), slurm.node):
        return
    node_list.write(node.places, now, beside(slurm.all_nodes(), slurm.node))


def is_due(age: float | None, host: str) -> bool:
    """Pure: whether a list of this age, in seconds, is to be written anew."""
    return age is None or not 0 <= age < RENEWED + SPREAD * (zlib.crc32(host.encode()) / (1 << 32))


def beside(nodes: tuple[NodeState, ...], host: str) -> tuple[str, ...]:
    """Pure: the nodes that are up and in a partition with this one, itself too; none without it."""
    own = {part for one in nodes if host in (one.name, one.host) for part in one.partitions}
    up = (one for one in nodes if not GONE.intersection(one.states))
    return tuple(one.name for one in up if own.intersection(one.partitions))
