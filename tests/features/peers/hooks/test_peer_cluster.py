"""Nodes of other jobs: whom a copy asks, what it takes, and what goes on to whom."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.cache.node import Node as CacheNode
from forestage.clock import Clock
from forestage.commands import sweep
from forestage.config import Config
from forestage.events import CopyOutcome
from forestage.features.peers import (
    activation,
    auth,
    chunk_readers,
    known_copies,
    node_list,
    upload_counts,
    wrong_data_notices,
)
from forestage.features.peers.client import PeerClient
from forestage.features.peers.connection import PeerRequestError
from forestage.features.peers.known_copies import OtherJobsPeers
from forestage.features.peers.node_list import PeerNodeList
from forestage.features.peers.peer_table import make_chunk_set
from forestage.features.peers.protocol import ChunkReceiver, ChunkRequest
from forestage.features.peers.ring import NodeRing
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from node import ALICE, HANGS, Node, until
from peering import CHUNK, PIECES, data, find_at, free_port, give, run
from peering import Node as Peer

NAMES = ("n1", "n2", "n3", "n4")
ALL = (1 << PIECES) - 1


@pytest.fixture
def path(node: Node) -> Path:
    return node.put("alice/image.sqsh", data())


@pytest.fixture
def peers(node: Node, tmp_path: Path) -> Iterator[dict[str, Peer]]:
    """n2 to n4, whose services run; none of them is of n1's job."""
    find_at({"n1": f"127.0.0.1:{free_port()}"})  # has no service
    made = {name: Peer(tmp_path / name, name) for name in NAMES[1:]}
    shared = {
        "enabled": True,
        "listen": "127.0.0.1",
        "reach": "cluster",
        "key_file": str(made["n2"].places.etc / "peer.key"),
    }
    node.configure(peers=shared)
    node_list.write_list(node.places, PeerNodeList(time.time(), dict.fromkeys(NAMES, "")))
    with contextlib.ExitStack() as served:
        for peer in made.values():
            peer.configure(reach="cluster")
            served.enter_context(peer.serving())
        yield made


def copied(node: Node, path: Path, nodes: str = "n1") -> CopyOutcome:
    found = run(node, node.environ(1, path) | {"SLURM_JOB_NODELIST": nodes})
    assert found.result == "copied"
    assert path.read_bytes() == data()
    assert node.shows_entry(path, node.identity(path).key)
    return found


def sessions(peer: Peer) -> int:
    given = upload_counts.find_upload_counts(peer.places.peer_counts)
    return given.sessions if given else 0


def note(peer: Peer | Node, key: str, **known: object) -> None:
    """Who read what on a peer that has an entry."""
    file = peer.cache.entry_dir(key) / chunk_readers.NAME
    file.write_bytes(msgspec.json.encode(known))


@pytest.mark.usefixtures("left_to_peers")
def test_copy_fetches_all_chunks_from_a_node_of_another_job_with_reach_cluster(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    give(peers["n3"], node, path, data())
    found = copied(node, path)
    assert (found.from_peers, found.givers) == (PIECES * CHUNK, ("n3",))
    known = chunk_readers.find_chunk_readers(node.cache.entry_dir(node.identity(path).key))
    assert known is not None
    assert (known.by, known.outside) == ({"n3": f"{ALL:x}"}, f"{ALL:x}")
    assert known.compared


def test_copy_asks_three_nodes_of_other_jobs_and_reads_the_source_if_none_has_the_image(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    assert copied(node, path).from_peers == 0
    until(lambda: all(sessions(peer) == 1 for peer in peers.values()), "three nodes to be asked")


@pytest.mark.ci
def test_peer_service_names_earlier_requesters_of_a_key_to_the_next_node(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    """n4 asked for the image a while ago, and n1 asks nobody else who has it."""
    key = node.identity(path).key
    config = peers["n4"].config.peers
    prover = auth.make_authenticator(config.key_file, NodePaths())
    asked = known_copies.query_known_copies(config, key, "n4", ("n4",), ("n2", "n3", "n4"), prover)
    assert asked.givers == ()
    give(peers["n4"], node, path, data())
    node_list.write_list(
        node.places, PeerNodeList(time.time(), dict.fromkeys(("n1", "n2", "n3"), ""))
    )
    assert copied(node, path).from_peers == 0, "a name that root's list does not have"
    nodes = ("n2", "n3", "n1", "n4")
    found = known_copies.query_known_copies(config, key, "n5", ("n5",), nodes, prover)
    assert (found.givers, found.readers, found.leaves_reading) == (("n4", "n1"), (), False)


def test_first_four_nodes_with_speculative_copies_share_the_reading_and_later_nodes_follow(
    node: Node, peers: dict[str, Peer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_copies, "PATIENCE", HANGS)  # a machine may stand still for a second
    key, config = node.identity(path).key, peers["n4"].config.peers
    prover = auth.make_authenticator(config.key_file, NodePaths())
    served = ("n2", "n3", "n4")
    # Behind these in the key's ring: nobody asks a node that has no service.
    behind = (
        name
        for name in (f"m{number}" for number in range(100_000))
        if NodeRing(key, (*served, name)).nodes[-1] == name
    )
    a, b, c, d = itertools.islice(behind, 4)
    listed = (*served, a, b, c, d)
    found = [
        known_copies.query_known_copies(config, key, me, (me,), listed, prover, is_speculative=True)
        for me in ("n2", a, "n4", b, "n3", c)
    ]
    first = ("n2", a, "n4", b)
    assert [one.readers for one in found] == [first[:number] for number in range(4)] + 2 * [first]
    assert [one.leaves_reading for one in found] == [False] * 4 + [True] * 2
    assert all(set(one.readers) <= set(one.givers) for one in found)
    assert known_copies.query_known_copies(config, key, d, (d,), listed, prover).readers == ()


@pytest.mark.ci
@pytest.mark.parametrize("nodes", ["n1", "n[1-2]"])
@pytest.mark.parametrize("off", ["reach: job", "peers off", "auto", "no list", "an old list"])
def test_copy_asks_no_node_of_another_job_unless_reach_peers_and_node_list_allow(
    node: Node, peers: dict[str, Peer], path: Path, off: str, nodes: str
) -> None:
    """Of other jobs: n2 is of this one, where there are two nodes."""
    give(peers["n3"], node, path, data())
    shared = msgspec.to_builtins(peers["n2"].config.peers) | {"listen": "127.0.0.1"}
    if off == "reach: job":
        node.configure(peers=shared | {"reach": "job"})
    elif off == "peers off":
        node.configure(peers=shared | {"enabled": False})
    elif off == "auto":  # and no service of its own
        node.configure(peers=shared | {"enabled": "auto"})
    elif off == "no list":
        node.places.nodes.unlink()
    else:
        then = time.time() - node_list.VALID_SECONDS - 60
        node_list.write_list(node.places, PeerNodeList(then, dict.fromkeys(NAMES, "")))
    assert copied(node, path, nodes).from_peers == 0
    for name, peer in peers.items():
        peer.end()
        is_asked = (name, nodes) == ("n2", "n[1-2]") and off not in ("peers off", "auto")
        assert not sessions(peer) or is_asked


def test_copy_asks_nodes_of_other_jobs_if_enabled_is_auto_and_the_own_service_runs(
    node: Node, peers: dict[str, Peer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_copies, "PATIENCE", HANGS)  # a machine may stand still for a second
    shared = msgspec.to_builtins(peers["n2"].config.peers) | {"listen": "127.0.0.1"}
    node.configure(peers=shared | {"enabled": "auto"})
    with activation.hold_sign(node.places):
        copied(node, path)
    until(lambda: all(sessions(peer) == 1 for peer in peers.values()), "three nodes to be asked")


def test_peer_service_with_reach_job_gives_other_jobs_no_chunks_and_no_names(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    give(peers["n2"], node, path, data())
    for peer in peers.values():
        peer.end()
        peer.configure(reach="job")
        peer.start()
    config, key = peers["n2"].config, node.identity(path).key
    prover = auth.make_authenticator(config.peers.key_file, NodePaths())
    assert (
        known_copies.query_known_copies(config.peers, key, "n1", ("n1",), NAMES, prover).givers
        == ()
    )
    taker = PeerClient(config, ("n1",), "n1", key, prover, OtherJobsPeers(("n2",)))
    receiver = ChunkReceiver(memoryview(bytearray(CHUNK)), lambda *_: None, lambda *_: None, bool)
    with pytest.raises(PeerRequestError, match="404"):
        taker.fetch_chunk("n2", ChunkRequest(0, 0, CHUNK, HANGS, 0.0, "cluster n1"), receiver)
    taker.fetch_chunk("n2", ChunkRequest(0, 0, CHUNK, HANGS, 0.0, "job n1"), receiver)


def test_switched_off_node_is_not_listed_as_giver_for_other_jobs(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    give(peers["n2"], node, path, data())
    config, key = peers["n2"].config, node.identity(path).key
    find = functools.partial(
        known_copies.query_known_copies, config.peers, key, "n1", ("n1",), NAMES
    )
    prover = auth.make_authenticator(config.peers.key_file, NodePaths())
    assert find(prover).givers == ("n2",)
    peers["n2"].places.disabled.write_text("INC-42\n")
    assert find(prover).givers == ()


@pytest.mark.usefixtures("read_late")
def test_copy_takes_no_wrong_chunk_from_a_node_of_another_job(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    give(peers["n2"], node, path, bytes(255 - byte for byte in data()))
    found = copied(node, path)
    assert found.from_peers == 0
    until(
        lambda: (
            (given := upload_counts.find_upload_counts(peers["n2"].places.peer_counts))
            and given.chunks
        ),
        "a wrong chunk",
    )
    known = chunk_readers.find_chunk_readers(node.cache.entry_dir(node.identity(path).key))
    assert known is not None
    assert known.outside == "0"


@pytest.mark.usefixtures("left_to_peers")
@pytest.mark.parametrize(("compared", "given"), [(False, PIECES // 2), (True, PIECES)])
def test_chunks_from_another_job_are_given_to_a_third_job_only_after_comparison(
    node: Node, peers: dict[str, Peer], path: Path, compared: bool, given: int
) -> None:
    give(peers["n2"], node, path, data())
    half = make_chunk_set(range(PIECES // 2))
    by = {"n2": f"{half:x}", "n9": f"{ALL & ~half:x}"}
    note(peers["n2"], node.identity(path).key, by=by, outside=f"{ALL & ~half:x}", compared=compared)
    assert copied(node, path).from_peers == given * CHUNK


@pytest.mark.usefixtures("left_to_peers")
def test_uncompared_chunks_are_given_to_nodes_of_the_same_job(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    give(peers["n2"], node, path, data())
    note(peers["n2"], node.identity(path).key, by={"n9": f"{ALL:x}"}, outside=f"{ALL:x}")
    found = copied(node, path, "n[1-2]")
    assert found.from_peers == PIECES * CHUNK
    known = chunk_readers.find_chunk_readers(node.cache.entry_dir(node.identity(path).key))
    assert known is not None
    assert known.by == {"n9": f"{ALL:x}"}, "its reader is not who gave it"


def read_wrongly(node: Node, peers: dict[str, Peer], path: Path) -> str:
    """n2 has all, half of it read by n4; n3 and n4 have what n2 gave them. The key."""
    key = node.identity(path).key
    wrong = bytes(255 - byte for byte in data())
    for name, peer in peers.items():
        give(peer, node, path, wrong)
        note(peer, key, by={"n4": f"{ALL:x}"}, outside="0" if name == "n4" else f"{ALL:x}",
             compared=True)  # fmt: skip
    return key


def noticed(peer: Peer, key: str) -> frozenset[str]:
    return wrong_data_notices.read_wrong_readers(peer.places, key)


@pytest.mark.usefixtures("read_late")
def test_notice_of_wrong_bytes_is_forwarded_to_the_nodes_that_took_the_readers_chunks(
    node: Node, peers: dict[str, Peer], path: Path
) -> None:
    """n3 took n4's chunks from n2, and n1 finds one of n2's wrong."""
    key = read_wrongly(node, peers, path)
    config, prover = (
        peers["n3"].config,
        auth.make_authenticator(peers["n3"].config.peers.key_file, NodePaths()),
    )
    taker = PeerClient(config, ("n3",), "n3", key, prover, OtherJobsPeers(("n2",)))
    receiver = ChunkReceiver(memoryview(bytearray(CHUNK)), lambda *_: None, lambda *_: None, bool)
    taker.fetch_chunk("n2", ChunkRequest(0, 0, CHUNK, HANGS, 0.0, "cluster n3"), receiver)
    node_list.write_list(node.places, PeerNodeList(time.time(), {"n1": "", "n2": ""}))
    assert copied(node, path).from_peers == 0
    until(lambda: noticed(peers["n2"], key) == noticed(peers["n3"], key) == {"n4"}, "notices")
    with pytest.raises(PeerRequestError, match="404"):
        taker.fetch_chunk("n2", ChunkRequest(1, CHUNK, CHUNK, HANGS, 0.0, "cluster n3"), receiver)


@pytest.mark.parametrize(("reader", "goes"), [("n4", True), ("n1", False)])
def test_sweep_evicts_an_entry_with_a_notice_of_wrong_bytes_by_its_reader(
    node: Node, path: Path, reader: str, goes: bool
) -> None:
    key = node.identity(path).key
    node.cache.prepare(require_mount=False)
    give(node, node, path, data())
    os.chown(node.cache.image_path(key), ALICE.uid, ALICE.gid)  # nothing else is wrong with it
    note(node, key, by={"n4": "1"}, outside="1", compared=True)
    wrong_data_notices.record_notice(node.places, key, reader)
    here = CacheNode.from_config(Config(cache="/mnt/nvme/forestage"), node.places, Clock())
    done = sweep.run_sweep(here, SlurmClient("", node="n1"), False, lambda text: None)
    assert done.problems == ()
    assert (done.evicted, node.cache.entry_dir(key).exists()) == ((key,) if goes else (), not goes)
    assert wrong_data_notices.read_wrong_readers(node.places, key) == frozenset()
