"""What this node's service has sent since metrics are kept, over its restarts.

It is kept in tally.json, as `given` and `last_given` of its `tally`.
"""

import msgspec

from forestage.features.peers.upload_counts import UploadCounts
from forestage.paths import NodePaths
from forestage.system import records


class UploadTotals(msgspec.Struct):
    """All that was sent, and what the service's own counts were then: they restart with it."""

    given: UploadCounts = msgspec.field(default_factory=lambda: UploadCounts(0.0))
    last_given: UploadCounts = msgspec.field(default_factory=lambda: UploadCounts(0.0))

    def add_since_last(self, now: UploadCounts | None) -> None:
        """Count what was sent since the last call."""
        if now is None:
            return
        same = now.since == self.last_given.since
        before = self.last_given if same else UploadCounts(now.since)
        self.given.bytes += max(0, now.bytes - before.bytes)
        self.given.chunks += max(0, now.chunks - before.chunks)
        self.given.sessions += max(0, now.sessions - before.sessions)
        self.given.refused += max(0, now.refused - before.refused)
        self.last_given = msgspec.structs.replace(now, keys={})


class _PeerTallyRecord(msgspec.Struct):
    """Of tally.json what is of peers."""

    tally: UploadTotals = msgspec.field(default_factory=UploadTotals)


def read_upload_totals(places: NodePaths) -> UploadTotals:
    """Return what tally.json has, nothing where it cannot be read. Raises OSError."""
    return (records.find(places.tally, _PeerTallyRecord) or _PeerTallyRecord()).tally
