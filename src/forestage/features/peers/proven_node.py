"""Which other node has shown last that it has this cluster's key, as this one has.

    /run/forestage/proven.json   written by a copy whose credential a peer could read, and by the
                                 service when a node has proven itself to it

That this node can read its own credential proves nothing: Debian's package of munge makes a key for
each node. What stands here is for people, and decides nothing.
"""

import contextlib

import msgspec

from forestage.paths import NodePaths
from forestage.system import folders, records


class ProvenNode(msgspec.Struct, frozen=True):
    """The node, by its name or address; `at` is in seconds since the epoch, by our clock."""

    node: str
    at: float


def find_proven_node(places: NodePaths) -> ProvenNode | None:
    """Return the node that was proven last since the boot, None if none was."""
    with contextlib.suppress(OSError):
        return records.find(places.proven_node, ProvenNode)
    return None


def record_proven_node(places: NodePaths, node: str, at: float) -> None:
    """Note that this node and the other one have the same key. What cannot be noted is not."""
    with contextlib.suppress(OSError):
        folders.ensure_directory(places.proven_node.parent, folders.PASSABLE)
        records.write(places.proven_node, msgspec.json.encode(ProvenNode(node, at)))
