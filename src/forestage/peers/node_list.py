"""The nodes that a copy may ask besides those of its job: root's own list, which a sweep writes.

    /run/forestage/nodes.json   the nodes of this node's partitions that are up, and since when

Hooks ask no Slurm, slurm.conf names neither dynamic nor cloud nodes, and the partition of a job or
step must not choose whom root asks: it is the node's own partitions that count. Lists that differ
between nodes only find less.
"""

import msgspec

from forestage.paths import Places
from forestage.system import folders, records

GOOD = 86400.0  # seconds; nobody is asked by an older list


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
