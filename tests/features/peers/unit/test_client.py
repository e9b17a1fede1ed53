"""The peers of a copy: the nodes of its job, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.config import Config
from forestage.config.keys import PeersSection
from forestage.errors import PeerError
from forestage.features import peers


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 64)
    file.chmod(0o600)
    return Config(peers=PeersSection(enabled=True, key_file=str(file)))


@pytest.mark.parametrize("nodelist", ["", "n1", "n[1]", "n[1-2", "(null)"])
def test_job_of_one_node_or_with_a_bad_node_list_has_no_peers(
    config: Config, nodelist: str
) -> None:
    assert peers.find_peer_client(config, "n1", nodelist, "k") is None


def test_peers_of_a_job_are_its_nodes_and_this_node(config: Config) -> None:
    found = peers.find_peer_client(config, "n1", "n[1-3]", "k")
    assert found is not None
    assert (found.nodes, found.me) == (("n1", "n2", "n3"), "n1")
    found = peers.find_peer_client(config, "other", "n[1-2]", "k")
    assert found is not None
    assert found.nodes == ("n1", "n2", "other")


def test_world_readable_peer_key_file_raises_peer_error(config: Config) -> None:
    Path(config.peers.key_file or "").chmod(0o644)
    with pytest.raises(PeerError):
        peers.find_peer_client(config, "n1", "n[1-2]", "k")
