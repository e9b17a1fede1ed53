"""A peer that has other bytes than the source, and hosts that a user would have asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.features.peers import upload_counts
from forestage.hooks.boundary import update_nodelist
from node import Node, until
from peering import Node as Peer
from peering import data, find_at, free_port, give, run


@pytest.fixture
def path(node: Node) -> Path:
    return node.put("alice/image.sqsh", data())


@pytest.fixture
def peer(node: Node, tmp_path: Path) -> Iterator[Peer]:
    """n2, whose service runs; n1 has the same key."""
    find_at({"n1": f"127.0.0.1:{free_port()}"})  # has no service
    made = Peer(tmp_path / "n2", "n2")
    peers = {
        "enabled": True,
        "key_file": str(made.places.etc / "peer.key"),
        "listen": "127.0.0.1",
    }
    node.configure(peers=peers)
    with made.serving():
        yield made


@pytest.mark.usefixtures("read_late")
def test_copy_has_the_sources_bytes_if_a_peer_has_other_bytes_under_the_key(
    node: Node, peer: Peer, path: Path
) -> None:
    give(peer, node, path, bytes(255 - byte for byte in data()))
    environ = node.environ(1, path) | {"SLURM_JOB_NODELIST": "n[1-2]"}
    copied = run(node, environ)
    assert (copied.result, copied.from_peers) == ("copied", 0)
    assert node.shows_entry(path, node.identity(path).key)
    assert path.read_bytes() == data()
    until(
        lambda: (
            (given := upload_counts.find_upload_counts(peer.places.peer_counts)) and given.chunks
        ),
        "a chunk of the peer's",
    )


def of_step(node: Node, path: Path) -> dict[str, str]:
    return node.environ(1, path) | {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }


def test_step_asks_no_peer_that_only_the_users_environment_names(
    node: Node, peer: Peer, path: Path
) -> None:
    give(peer, node, path, data())
    assert run(node, of_step(node, path)).from_peers == 0


@pytest.mark.usefixtures("read_late")
def test_step_asks_the_peers_that_slurm_named_to_the_prolog(
    node: Node, peer: Peer, path: Path
) -> None:
    give(peer, node, path, data())
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch()
    named = node.environ(1, path) | {"SLURM_JOB_NODELIST": "n[1-2]"}
    update_nodelist("prolog", named, str(node.places.run))
    assert run(node, of_step(node, path)).from_peers > 0
