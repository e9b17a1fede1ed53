"""The door of copies: which nodes help with one. How its bytes come then is in peer_copy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from forestage import log
from forestage.cache.part import chunk_count
from forestage.errors import PeerError
from forestage.features import peers
from forestage.features.peers import activation, upload_counts
from forestage.stage.engines import EngineResult

MAX_SHARED = 131072  # chunks: more of them fit no header (32 KiB) and are not asked of peers

if TYPE_CHECKING:
    import threading

    from forestage.cache.arrival_map import ArrivalMap
    from forestage.cache.part import Part
    from forestage.features.peers.client import PeerClient
    from forestage.sources.source import ReadableSource
    from forestage.stage.chunks import CopyTuning
    from forestage.stage.task import CopyTask


class PeerHelpers:
    """The nodes that help with one copy."""

    def __init__(self, peers: PeerClient) -> None:
        self.peers = peers

    def copy(
        self,
        source: ReadableSource,
        part: Part,
        tuning: CopyTuning,
        stop: threading.Event,
        readers: ArrivalMap | None,
    ) -> EngineResult:
        """Copy as chunks.copy_chunks does, with chunks of other nodes."""
        from forestage.features.peers import peer_copy  # few copies have peers

        # What peers send takes the same links and processors: the source's pace is not known.
        given = peer_copy.copy_with_peers(source, part, tuning, stop, self.peers, readers)
        return EngineResult(given, self.peers.givers)


def helpers(task: CopyTask) -> PeerHelpers | None:
    """Return the nodes that are to help; without them a copy is merely slower."""
    node, job = task.node, task.job
    if not activation.is_on(node.config, node.places, node.clock.monotonic()):
        return None
    count = chunk_count(task.image.size, task.chunk)
    if count > MAX_SHARED:
        detail = f"{count} chunks, at most {MAX_SHARED}: a larger chunk_size makes fewer"
        log.write_log_line(f"stager job={job.id} peers=none detail={detail!r}", by_slurm=True)
        return None
    try:
        about = node.config, job.node, job.nodelist, task.key, node.places
        found = peers.find_peer_client(*about, is_speculative=bool(job.expected), chunks=count)
    except (PeerError, OSError) as error:
        log.write_log_line(f"stager job={job.id} peers=none detail={str(error)!r}", by_slurm=True)
        return None
    return PeerHelpers(found) if found else None


def uploaded(task: CopyTask) -> int:
    """Return the bytes of this key that the node's peer service uploaded.

    It writes them once a second.
    """
    with contextlib.suppress(OSError):  # only a figure
        given = upload_counts.find_upload_counts(task.node.places.peer_counts)
        return given.key_bytes(task.key) if given else 0
    return 0
