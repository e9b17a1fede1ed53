"""Where a copy finds the services of other nodes: by the site's pattern, or at Slurm's NodeAddr.

With the default `peers.address` that is NodeAddr of root's list (features/peers/node_list.py),
where slurmd
is found too, and no name service is asked. Without the list, or of a node that is not in it, it is
the node's name. A site's own pattern makes a name, which comes first; NodeAddr is for one that does
not resolve.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from forestage.config import ServiceAddress
from forestage.config.keys import PeersSection
from forestage.features.peers import node_list
from forestage.paths import NodePaths

NO_ADDRESSES: Mapping[str, str] = {}


class AddressFinder(Protocol):
    """What knows where other nodes find a node: `NodeAddresses`, or the site's pattern alone."""

    def node_address(self, node: str) -> ServiceAddress: ...


class NodeAddresses:
    """The address of each node's service; `listed` has NodeAddr by the node's name."""

    def __init__(self, peering: PeersSection, listed: Mapping[str, str] = NO_ADDRESSES) -> None:
        self._peering = peering
        self._listed = listed

    def node_address(self, node: str) -> ServiceAddress:
        """Return where the other nodes find `node`."""
        named = self._peering.node_address(node)
        listed = self._listed.get(node, "")
        if not listed or listed == named.host:
            return named
        if named.host == node:  # the default: NodeAddr is what slurmd is found by
            named, listed = ServiceAddress(listed, named.port), node
        return msgspec.structs.replace(named, fallback_host=listed)


def load_addresses(peering: PeersSection, places: NodePaths) -> NodeAddresses:
    """Return the addresses by root's list, if there is one that can be read."""
    with contextlib.suppress(OSError):
        return NodeAddresses(peering, node_list.read_addresses(places, time.time()))
    return NodeAddresses(peering)
