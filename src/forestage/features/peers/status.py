"""What `forestage status` says of peers: what this node's service has sent, and who trusts it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forestage.features.contexts import StatusPart
from forestage.features.peers import proven_node, upload_counts
from forestage.features.peers.upload_counts import UploadCounts
from forestage.paths import NodePaths
from forestage.system.terminal import format_count
from forestage.units import format_size

if TYPE_CHECKING:
    from forestage.features.contexts import StatusFacts


def read_status(facts: "StatusFacts") -> StatusPart:
    """Return what was sent, None if no service has run since the boot, and who is proven.

    Proven is the node that has shown last that it has the same key, "" if none has.
    """
    served, proof = (
        upload_counts.find_upload_counts(facts.node.places.peer_counts),
        proven_node.find_proven_node(facts.node.places),
    )
    name = proof.node if proof else ""
    rows = list_rows(served, name)
    return StatusPart({"served": served, "proven": name}, after="copies", rows=rows)


def read_sent(places: NodePaths) -> Mapping[str, int]:
    """Return the bytes of each key that went to other nodes, as far as that is known."""
    served = upload_counts.find_upload_counts(places.peer_counts)
    return served.keys if served else {}


def list_rows(served: UploadCounts | None, proven_with: str) -> tuple[tuple[str, str], ...]:
    """Return what is printed of it. Pure."""
    if not served:
        return ()
    sent = f"{format_size(served.bytes)} in {format_count(served.chunks, 'chunk')}"
    proof = f"proven with {proven_with}" if proven_with else "none has answered yet"
    return (("served", f"{sent} to other nodes ({proof})"),)
