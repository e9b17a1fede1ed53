"""What the metrics say of peers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from forestage.config import Config
from forestage.features.contexts import MetricFamily, MetricsPart
from forestage.features.peers import activation, silent_nodes, upload_counts, upload_totals
from forestage.features.peers.upload_totals import UploadTotals
from forestage.paths import NodePaths

if TYPE_CHECKING:
    from forestage.features.contexts import MetricsFacts


def read_metrics(facts: "MetricsFacts") -> MetricsPart:
    """Return whether copies ask other nodes, which are silent, what was sent. Raises OSError."""
    places = facts.places
    info = {}
    if facts.config is not None:
        has_service = activation.is_service_running(places, facts.now)
        info = {"peers": describe_peers(facts.config, has_service)}
    silent = len(silent_nodes.list_silent_nodes(places, facts.now))
    return MetricsPart(info, tuple(list_families(silent, upload_totals.read_upload_totals(places))))


def count(places: NodePaths) -> dict[str, object]:
    """Return the counts that are to be kept now. Raises OSError."""
    found = upload_totals.read_upload_totals(places)
    found.add_since_last(upload_counts.find_upload_counts(places.peer_counts))
    return msgspec.structs.asdict(found)


def describe_peers(config: Config, has_service: bool) -> str:
    """Return whether copies ask other nodes; `down` is for want of this node's service. Pure."""
    if not activation.may_serve(config):
        return "off"
    return "on" if has_service else "down"


def list_families(silent: int, counted: UploadTotals) -> Iterator[MetricFamily]:
    """Yield the nodes that did not answer, and what was sent. Pure."""
    text = "Nodes whose peer service did not answer this one within five minutes."
    yield MetricFamily("peers_unanswered", text, after="last_sweep_timestamp_seconds", value=silent)
    given = counted.given
    for name, text, grown in (
        ("peer_served_bytes", "Bytes given to other nodes.", given.bytes),
        ("peer_served_chunks", "Chunks given to other nodes.", given.chunks),
        ("peer_sessions", "Sessions that other nodes have opened.", given.sessions),
        ("peer_refused", "Requests of peers that were refused.", given.refused),
    ):
        yield MetricFamily(name, text, after="swept_leases", kind="counter", value=grown)
