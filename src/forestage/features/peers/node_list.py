"""The nodes that a copy may ask besides those of its job: root's own list, and addresses.

    /run/forestage/nodes.json   the nodes of this node's partitions, and where slurmd is found

The minute's work writes it where peers are on.

Hooks ask no Slurm, slurm.conf names neither dynamic nor cloud nodes, and the partition of a job or
step must not choose whom root asks: it is the node's own partitions that count. Lists that differ
between nodes only find less.

One question to slurmctld a node and day, for all nodes at once: with 10,000 of them 3.6 MB and
30 ms of slurmctld's time. The nodes' names spread them over some hours, and the first ones, which
all nodes may ask after the same boot, over DELAY_PER_NODE for each node (docs/peers.md).
"""

import socket
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from forestage.features.peers import activation
from forestage.paths import NodePaths
from forestage.system import folders, records

if TYPE_CHECKING:
    from forestage.cache.node import Node
    from forestage.clock import Clock
    from forestage.config import Config
    from forestage.features.peers.slurm_nodes import SlurmNodeState
    from forestage.slurm.slurm_client import SlurmClient

VALID_SECONDS = 86400.0  # seconds; nobody is asked by an older list
RENEW_AFTER = 16 * 3600.0  # seconds, the earliest
DELAY_PER_NODE = (
    0.06  # seconds for each node until the first list; slurmctld works half as long for it
)
MAX_FIRST_DELAY = 600.0  # seconds, at most
SPREAD = 6 * 3600.0  # seconds: some nodes later than others, each before its list is too old
DOWN_STATES = frozenset(
    ("DOWN", "ERROR", "FAIL", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")
)


class PeerNodeList(msgspec.Struct, frozen=True):
    """nodes.json: by the names that Slurm has for them, in their order, where slurmd is found.

    That is NodeAddr, an address or a name. `away` are nodes that were not up, and `written` is in
    seconds since the epoch.
    """

    written: float
    nodes: dict[str, str]
    away: dict[str, str] = {}


def read_up_nodes(places: NodePaths, now: float) -> tuple[str, ...]:
    """The nodes that are up; none where there is no list, or only an old one. Raises OSError."""
    found = _find_recent_list(places, now)
    return tuple(found.nodes) if found else ()


def read_addresses(places: NodePaths, now: float) -> dict[str, str]:
    """NodeAddr by node, also of those that were not up; as `read_up_nodes`. Raises OSError."""
    found = _find_recent_list(places, now)
    return {**found.away, **found.nodes} if found else {}


def _find_recent_list(places: NodePaths, now: float) -> PeerNodeList | None:
    found = records.find(places.nodes, PeerNodeList)
    return found if found and 0 <= now - found.written <= VALID_SECONDS else None


def find_list_age(places: NodePaths, now: float) -> float | None:
    """Seconds since the list was written; None: there is none."""
    found = records.find(places.nodes, PeerNodeList)
    return now - found.written if found else None


def write_list(places: NodePaths, found: PeerNodeList) -> None:
    """Replaces the list. Raises OSError."""
    folders.ensure_directory(places.nodes.parent, folders.PASSABLE)
    records.write(places.nodes, msgspec.json.encode(found))


def should_renew(config: "Config", places: NodePaths, clock: "Clock") -> bool:
    """Whether this node's list is due, and peers are on. Raises OSError."""
    due = is_due(find_list_age(places, clock.wall()), socket.gethostname().partition(".")[0])
    return due and activation.is_on(config, places, clock.monotonic())


def renew_if_due(
    node: "Node", slurm: "SlurmClient", wait: Callable[[float], None] = time.sleep
) -> None:
    """Writes the list where it is due. Raises SlurmError, OSError."""
    now = node.clock.wall()
    known = find_list_age(node.places, now)
    is_on = activation.is_on(node.config, node.places, node.clock.monotonic())
    if not is_on or not is_due(known, slurm.node):
        return
    from forestage.features.peers import slurm_nodes  # hooks have no use for it

    if known is None:  # as after a boot, perhaps of all nodes at once
        count = slurm_nodes.count_configured_nodes(slurm.conf, node.places.root)
        wait(_hash_position(slurm.node) * min(MAX_FIRST_DELAY, count * DELAY_PER_NODE))
    write_list(node.places, select_partition_nodes(slurm_nodes.list_nodes(slurm), slurm.node, now))


def is_due(age: float | None, host: str) -> bool:
    """Pure: whether a list of this age, in seconds, is to be written anew."""
    return age is None or not 0 <= age < RENEW_AFTER + SPREAD * _hash_position(host)


def select_partition_nodes(
    nodes: "tuple[SlurmNodeState, ...]", host: str, now: float
) -> PeerNodeList:
    """Pure: the nodes in a partition with this one, itself too; none without it."""
    own = {part for one in nodes if host in (one.name, one.host) for part in one.partitions}
    up: dict[str, str] = {}
    away: dict[str, str] = {}
    for one in sorted(nodes, key=lambda one: one.name):
        if own.intersection(one.partitions):
            where = away if DOWN_STATES.intersection(one.states) else up
            where[one.name] = one.address if one.address != one.name else ""
    return PeerNodeList(now, up, away)


def _hash_position(host: str) -> float:
    """Pure: where this node stands among all, from 0 to 1."""
    return zlib.crc32(host.encode()) / (1 << 32)
