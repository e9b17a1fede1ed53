"""Root's list of nodes: whom a sweep names, how often Slurm is asked, how long the list counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import Config
from forestage.config.keys import PeersSection
from forestage.errors import SlurmError
from forestage.features.peers import node_list, slurm_nodes
from forestage.features.peers.node_list import PeerNodeList
from forestage.features.peers.slurm_nodes import SlurmNodeState
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient

DAY = 86400.0
HOUR = 3600.0

# slurm-wlm 22.05.8, scontrol --oneliner show node; shortened between the names.
SHOWN = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.77.0.2 NodeHostName=host1 "
    "Version=22.05.8 RealMemory=1 State=MIXED ThreadsPerCore=1 Partitions=gpu,debug BootTime=None\n"
    "NodeName=n2 NodeAddr=n2 NodeHostName=n2 State=IDLE+CLOUD+POWERED_DOWN Partitions=gpu \n"
    "NodeName=n3 NodeHostName=n3 State=DOWN* Partitions=gpu Reason=Not responding [slurm@2026]\n"
    "NodeName=n4 NodeHostName=n4 State=IDLE+DRAIN Partitions=gpu Reason=State=DOWN NodeName=x\n"
    "NodeName=n5 NodeHostName=n5 State=IDLE Partitions=other \n"
    "NodeName=n6 NodeHostName=n6 State=ALLOCATED Partitions=debug \n"
    "NodeName=n7 NodeHostName=n7 State=IDLE \n"
    "NodeName=n8 NodeHostName=n8 State=IDLE* Partitions=gpu\n"
)


def test_node_list_is_read_back_with_names_and_addresses(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    node_list.write_list(
        places, PeerNodeList(1000.0, {"n1": "10.0.0.1", "n2": ""}, {"n3": "10.0.0.3"})
    )
    assert node_list.read_up_nodes(places, 1000.0 + DAY) == ("n1", "n2")
    assert node_list.read_addresses(places, 1000.0 + DAY) == {
        "n1": "10.0.0.1",
        "n2": "",
        "n3": "10.0.0.3",
    }
    assert node_list.find_list_age(places, 1500.0) == 500.0


@pytest.mark.parametrize("now", [1001.0 + DAY, 999.0])
def test_node_list_older_than_a_day_or_from_the_future_is_empty(tmp_path: Path, now: float) -> None:
    places = NodePaths(tmp_path)
    node_list.write_list(places, PeerNodeList(1000.0, {"n1": "10.0.0.1"}))
    assert node_list.read_up_nodes(places, now) == ()
    assert node_list.read_addresses(places, now) == {}


# The last one as the build before wrote it.
@pytest.mark.parametrize("text", [None, "", "n1 n2", '{"written": 1000, "nodes": ["n1"]}'])
def test_missing_or_damaged_node_list_is_empty(tmp_path: Path, text: str | None) -> None:
    places = NodePaths(tmp_path)
    if text is not None:
        places.nodes.parent.mkdir(parents=True)
        places.nodes.write_text(text)
    assert node_list.read_up_nodes(places, 1000.0) == ()
    assert node_list.read_addresses(places, 1000.0) == {}
    assert node_list.find_list_age(places, 1000.0) is None


def test_nodes_are_parsed_from_scontrol_output() -> None:
    found = slurm_nodes.parse_nodes(SHOWN + "\n\n")
    assert len(found) == 8
    assert found[0] == SlurmNodeState("n1", "host1", ("MIXED",), ("gpu", "debug"), "10.77.0.2")
    assert found[1].states == ("IDLE", "CLOUD", "POWERED_DOWN")
    assert found[3] == SlurmNodeState("n4", "n4", ("IDLE", "DRAIN"), ("gpu",))
    assert found[6].partitions == ()


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("n1", ("n1", "n4", "n6")),
        ("host1", ("n1", "n4", "n6")),
        ("n5", ("n5",)),
        ("n7", ()),
        ("elsewhere", ()),
    ],
)
def test_node_list_names_the_nodes_that_are_up_in_this_nodes_partitions(
    host: str, named: tuple[str, ...]
) -> None:
    assert (
        tuple(node_list.select_partition_nodes(slurm_nodes.parse_nodes(SHOWN), host, 0.0).nodes)
        == named
    )


def test_node_list_has_addresses_of_nodes_that_are_down_too() -> None:
    found = node_list.select_partition_nodes(slurm_nodes.parse_nodes(SHOWN), "n1", 5.0)
    assert found == PeerNodeList(
        5.0, {"n1": "10.77.0.2", "n4": "", "n6": ""}, {"n2": "", "n3": "", "n8": ""}
    )


def test_node_list_is_renewed_at_different_hours_by_different_nodes_before_its_end() -> None:
    hosts = [f"n{number}" for number in range(200)]
    renewed = [min(h for h in range(25) if node_list.is_due(h * HOUR, host)) for host in hosts]
    assert (min(renewed), max(renewed)) == (17, 22)
    assert max(map(renewed.count, range(25))) < 60
    assert node_list.is_due(None, "n1")
    assert node_list.is_due(-1.0, "n1"), "the clock was set back"


class Told(SlurmClient):
    asked: list[int]

    def query(self, *words: str, **how: object) -> str:
        self.asked.append(1)
        if len(self.asked) > 1:
            raise SlurmError("Unable to contact slurm controller")
        return SHOWN


def node_of(folder: Path, **peers: object) -> Node:
    config = Config(cache="/nvme", peers=msgspec.convert(peers, PeersSection))
    return Node.from_config(config, NodePaths(folder), Clock())


def test_node_list_is_queried_from_slurm_once_and_kept_if_a_query_fails(tmp_path: Path) -> None:
    node, told = node_of(tmp_path, enabled=True, reach="cluster"), Told("", node="n1")
    told.asked = []
    for _ in range(3):
        node_list.renew_if_due(node, told)
    now = node.clock.wall()
    assert (node_list.read_up_nodes(node.places, now), len(told.asked)) == (("n1", "n4", "n6"), 1)
    node_list.write_list(node.places, PeerNodeList(now - 23 * HOUR, {"n9": ""}))
    with pytest.raises(SlurmError):
        node_list.renew_if_due(node, told)
    assert node_list.read_up_nodes(node.places, now) == ("n9",)


@pytest.mark.parametrize("reach", ["job", "cluster"])
def test_node_list_is_wanted_with_peers_on_and_any_reach(tmp_path: Path, reach: str) -> None:
    """Of a job's nodes it has the addresses."""
    node = node_of(tmp_path, enabled=True, reach=reach)
    assert node_list.should_renew(node.config, node.places, node.clock)
    told = Told("", node="n1")
    told.asked = []
    node_list.renew_if_due(node, told)
    assert len(told.asked) == 1
    assert not node_list.should_renew(node.config, node.places, node.clock)


def test_node_list_is_not_queried_with_peers_off(tmp_path: Path) -> None:
    node, told = node_of(tmp_path, enabled=False, reach="cluster"), Told("", node="n1")
    told.asked = []
    node_list.renew_if_due(node, told)
    assert (told.asked, node_list.find_list_age(node.places, 0.0)) == ([], None)
    assert not node_list.should_renew(node.config, node.places, node.clock)
