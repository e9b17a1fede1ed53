"""Copies with the other nodes' help: how many bytes these gave, and how many this one gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from forestage import log
from forestage.cache import evict
from forestage.cache.node import Node
from forestage.config.keys import PeersSection
from forestage.errors import CopyStopped
from forestage.features.peers import activation, auth, client, peer_copy
from forestage.features.peers.engine import MAX_SHARED, PeerHelpers
from forestage.features.peers.schedule import SchedulePolicy
from forestage.features.peers.upload_counts import UploadCountWriter
from forestage.slurm.job import Job
from forestage.sources import source as stage_source
from forestage.sources.source import OpenImage, ReadableSource
from forestage.stage import engines, pipeline
from forestage.stage.pipeline import CopyStats
from forestage.stage.task import CopyTask
from peering import OtherNode

CONTENT = b"container " * (1 << 14)
# Nothing is read beside the first connection, nor in others' stead.
FROM_PEERS = SchedulePolicy(max_probe_reads=0, probe=600.0, grace=600.0)


@pytest.fixture
def task(
    shared: Path, look: Callable[[Path], OpenImage], staging_node: Node, asking: Job
) -> Iterator[CopyTask]:
    file = shared / "image.sqsh"
    file.write_bytes(CONTENT)
    found = look(file)
    yield CopyTask(staging_node, asking, found)
    found.close()


def run(task: CopyTask) -> CopyStats:
    figures = CopyStats()
    pipeline.run_copy(task, threading.Event(), figures)
    return figures


def sharing(task: CopyTask, **changes: object) -> CopyTask:
    node = task.node.with_config(peers=PeersSection(enabled=True), **changes)
    return msgspec.structs.replace(task, node=node)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherNode:
    node = OtherNode(CONTENT)
    monkeypatch.setattr("forestage.features.peers.find_peer_client", lambda *_, **__: node)
    monkeypatch.setattr(peer_copy, "make_policy", lambda *_: FROM_PEERS)
    return node


def test_copy_counts_bytes_from_peers_and_leaves_no_peers_file_in_the_entry(
    task: CopyTask, other: OtherNode
) -> None:
    assert run(sharing(task)).from_peers == len(CONTENT)
    assert task.node.cache.image_path(task.key).read_bytes() == CONTENT
    assert not (task.node.cache.entry_dir(task.key) / "peers").exists()


@pytest.mark.parametrize(("count", "helped"), [(MAX_SHARED, True), (MAX_SHARED + 1, False)])
def test_copy_with_more_chunks_than_a_header_holds_uses_no_peers(
    task: CopyTask, other: OtherNode, monkeypatch: pytest.MonkeyPatch, count: int, helped: bool
) -> None:
    said: list[str] = []
    used: list[object] = []

    class Stub:
        def needed_bytes(self, *_: object) -> int:
            return 0

        def reserve(self, *_: object) -> None: ...

        def copy(self, *arguments: PeerHelpers | None) -> int:
            helpers = arguments[-2]
            used.append(helpers and helpers.peers)
            raise CopyStopped

    monkeypatch.setattr(engines, "choose_engine", lambda *_: Stub())
    monkeypatch.setattr(log, "write_log_line", lambda line, by_slurm: said.append(line))
    monkeypatch.setattr(stage_source, "open_source", lambda *_: ReadableSource(-1, None, count))
    monkeypatch.setattr(evict, "make_room", lambda *_, **__: ())
    identity = msgspec.structs.replace(task.image.identity, size=count)
    wanted = msgspec.structs.replace(task.image, identity=identity)
    task = msgspec.structs.replace(task, opened=msgspec.structs.replace(task.opened, image=wanted))
    with pytest.raises(CopyStopped):
        run(sharing(task, chunk_size=1))
    assert used == [other if helped else None]
    assert len(said) == (0 if helped else 1)


@pytest.mark.parametrize(("nodes", "helped"), [("n[1-2]", False), ("n[1-64]", True)])
def test_copy_uses_no_peers_in_a_job_of_two_nodes_by_default(
    task: CopyTask, monkeypatch: pytest.MonkeyPatch, nodes: str, helped: bool
) -> None:
    job = msgspec.structs.replace(task.job, node="n1", nodelist=nodes)
    sign = task.node.places.peer_sign
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.touch()  # without it peers are not even imported
    monkeypatch.setattr(activation, "is_service_running", lambda *_: True)
    monkeypatch.setattr(auth, "make_authenticator", lambda *_: None)
    monkeypatch.setattr(client, "PeerClient", lambda *_: OtherNode(CONTENT))
    monkeypatch.setattr(peer_copy, "make_policy", lambda *_: FROM_PEERS)
    found = run(msgspec.structs.replace(task, job=job))
    assert bool(found.from_peers) is helped


def test_copy_outcome_counts_uploaded_bytes_of_its_own_key_during_the_copy(
    task: CopyTask, other: OtherNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = UploadCountWriter(task.node.places.peer_counts, since=1.0)
    uploads.count_chunk(task.key, 100)
    uploads.count_chunk("another", 1000)
    uploads.flush()
    real = peer_copy.copy_with_peers

    def copying(*of: Any) -> Any:
        uploads.count_chunk(task.key, 11)
        uploads.flush()
        return real(*of)

    monkeypatch.setattr(peer_copy, "copy_with_peers", copying)
    assert run(sharing(task)).uploaded == 11


class Unreadable:
    """A file that lies nowhere, which only other nodes have."""

    is_read_through: ClassVar[bool] = False

    def open(self) -> ReadableSource:
        return ReadableSource(-1, None, len(CONTENT), "/made/up", self.read)

    def read(self, start: int, want: memoryview) -> None:
        raise AssertionError("it is read")

    def check_unchanged(self) -> None: ...


def test_copy_of_a_source_that_only_peers_have_is_completed_from_peers(
    task: CopyTask, other: OtherNode
) -> None:
    opened = OpenImage(task.image, task.job.user, -1, other_source=Unreadable())
    made_up = msgspec.structs.replace(task, opened=opened)
    assert run(sharing(made_up)).from_peers == len(CONTENT)
    assert task.node.cache.image_path(task.key).read_bytes() == CONTENT
