"""What the service has sent, over its restarts, as metrics keep it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from forestage.features.peers import metrics, upload_totals
from forestage.features.peers.upload_counts import UploadCounts
from forestage.features.peers.upload_totals import UploadTotals
from forestage.paths import NodePaths


def test_upload_totals_survive_a_restart_of_the_peer_service() -> None:
    found = UploadTotals()
    for now in (
        UploadCounts(since=1.0, bytes=100, chunks=1, sessions=1, refused=2),
        UploadCounts(since=1.0, bytes=150, chunks=2, sessions=1, refused=2),
        None,  # the node has restarted, the service has not begun
        UploadCounts(since=2.0, bytes=30, chunks=1, sessions=1),
        UploadCounts(since=2.0, bytes=30, chunks=1, sessions=1),
    ):
        found.add_since_last(now)
    given = found.given
    assert (given.bytes, given.chunks, given.sessions, given.refused) == (180, 3, 2, 2)


def test_upload_metrics_add_new_counts_to_the_stored_tally(tmp_path: Path) -> None:
    """Beside counts that are not of peers, as an earlier release has written it."""
    places = NodePaths(tmp_path)
    kept = {"swept": 3, "given": {"since": 0.0, "bytes": 70}, "last_given": {"since": 1.0}}
    places.tally.parent.mkdir(parents=True)
    places.tally.write_bytes(msgspec.json.encode({"tally": kept, "seen": {}}))
    places.peer_counts.parent.mkdir(parents=True, exist_ok=True)
    places.peer_counts.write_bytes(msgspec.json.encode(UploadCounts(1.0, bytes=30)))
    (family,) = (
        family
        for family in metrics.list_families(0, upload_totals.read_upload_totals(places))
        if family.name == "peer_served_bytes"
    )
    assert family.value == 70
    added = metrics.count(places)
    assert msgspec.to_builtins(added)["given"]["bytes"] == 100
    places.tally.write_bytes(b"{")
    assert msgspec.to_builtins(metrics.count(places))["given"]["bytes"] == 30
