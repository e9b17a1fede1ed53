"""Nodes that say nothing: remembered for other copies, and no copy waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache import allocation
from forestage.cache.part import Part
from forestage.features.peers import auth, client, connection, peer_copy, protocol, silent_nodes
from forestage.features.peers.connection import PeerRequestError
from forestage.sources.source import ReadableSource
from forestage.stage.chunks import CopyTuning
from node import HANGS
from peering import Client, Node, find_at, free_port

CHUNK = 64 << 10
COUNT = 16
NEVER = 3600.0


@contextlib.contextmanager
def mute() -> Iterator[int]:
    """The port of a program that accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def dropping() -> Iterator[int]:
    """A port at which the first packet of a connection is lost."""
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = undo.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.contextmanager
def closed() -> Iterator[int]:
    yield free_port()


Port = Callable[[], contextlib.AbstractContextManager[int]]


def is_silent(node: Node) -> bool:
    return silent_nodes.is_silent(node.places, "n1", time.monotonic())


@pytest.mark.parametrize(("at", "silent"), [(mute, True), (dropping, True), (closed, False)])
def test_peer_that_does_not_answer_is_recorded_as_silent_and_a_refusing_peer_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Port, silent: bool
) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", 0.2)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.2)
    monkeypatch.setattr(client, "SILENCE", 0.15)
    node = Node(tmp_path / "n2")
    copy = Client(node, "a" * 32).peers
    with at() as port:
        find_at({"n1": f"127.0.0.1:{port}"})
        if not silent:  # this host may be slow
            monkeypatch.setattr(client, "SILENCE", NEVER)
        with pytest.raises(PeerRequestError):
            copy.open_session("n1", lambda: False)
    assert is_silent(node) == silent
    assert copy.list_silent_nodes() == ({"n1"} if silent else set())


def test_answer_of_a_peer_clears_its_silent_record(tmp_path: Path) -> None:
    node = Node(tmp_path / "n1")
    with node.serving():
        copy = Client(node, node.publish()).peers
        silent_nodes.record_silence(node.places, "n1", time.monotonic())
        assert is_silent(node)
        copy.open_session("n1", lambda: False)
        assert not is_silent(node)


def test_peer_with_another_protocol_version_is_refused_and_not_recorded_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENCE", NEVER)
    node = Node(tmp_path / "n1")
    with node.serving("auth.PROTOCOL = 'forestage-0'\n"):
        copy = Client(node, node.publish()).peers
        with pytest.raises(PeerRequestError) as caught:
            copy.open_session("n1", lambda: False)
        assert caught.value.why == "refused"
        node.until_said(b"another")
    assert not is_silent(node)


@pytest.mark.parametrize("how", ["mute", "stopped"])
def test_copy_among_silent_peers_reads_the_whole_source_without_waiting_for_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """No thread that brings chunks waits for them: their limits are an hour here."""
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", NEVER)
    monkeypatch.setattr(connection, "SILENCE_TIMEOUT", NEVER)
    data = os.urandom(COUNT * CHUNK)
    (tmp_path / "source").write_bytes(data)
    node, key = Node(tmp_path / "n1"), "b" * 32
    with contextlib.ExitStack() as undo:
        config = node.config
        if how == "mute":
            find_at({"n1": f"127.0.0.1:{undo.enter_context(mute())}"})
        else:
            undo.callback(node.kill)
            node.start()
            assert node.process is not None
            node.process.send_signal(signal.SIGSTOP)
        prover = auth.make_authenticator(config.peers.key_file, "")
        peers = client.PeerClient(config, ("n1", "n2"), "n2", key, prover, places=node.places)
        fd = os.open(tmp_path / "source", os.O_RDONLY)
        undo.callback(os.close, fd)
        part = Part(tmp_path / key)
        part.directory.mkdir()
        found = allocation.list_data_chunks(fd, len(data), CHUNK)
        allocation.reserve_part(part, len(data), CHUNK, found)
        ended = threading.Event()

        def copy() -> None:
            content = ReadableSource(fd, None, len(data))
            peer_copy.copy_with_peers(content, part, CopyTuning(2, CHUNK), threading.Event(), peers)
            ended.set()

        threading.Thread(target=copy, daemon=True).start()
        assert ended.wait(HANGS)
    assert part.image.read_bytes() == data
