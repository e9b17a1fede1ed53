"""Peers as nodes have them by default: only `sources` is set, and the service runs or not."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Iterator

import pytest
from cluster import Cluster
from fleet import Fleet, networked
from jobs import CLI
from spec import VENV, Net

NODES = 6
MIB = 96
# A few seconds for each copy, so that something can happen in the middle of it.
LINKS = Net(node_mbit=200, store_mbit=400)
# How much is read of the source: a machine that stands still for seconds has nodes tire of waiting
# for one another, rightly. That the bytes are right holds for each attempt.
ATTEMPTS = 3
# On a busy machine; bench/first-start shows 1.0 to 1.1.
ONCE = 1.5


class Installed(Fleet):
    """Its configuration is docs/install.md's: directories of sources, and nothing else."""

    def configure(self, **keys: object) -> None:
        # JSON is YAML.
        text = json.dumps({"sources": ["/shared"], **keys})
        self.cluster.write("/etc/forestage/forestage.yaml", text)

    def signal(self, node: str, number: int) -> None:
        self.cluster.signal(self._services[node], number)

    def start_again(self, node: str) -> None:
        self.end_services([node])
        self.serve([node])

    def failing(self, node: str) -> list[str]:
        """The findings for which a node's health check fails."""
        argv = [CLI, "check", "--json"]
        ran = self.cluster.run(argv, user="root", node=node, check=False)
        found = json.loads(ran.stdout)["findings"]
        return [one["id"] for one in found if one["level"] != "note"]

    def run_job(self, name: str, during: Callable[[str], None] = lambda path: None) -> float:
        """Let a job on all nodes read a new file; returns how often the source was read.

        `during` is called as soon as the job was submitted. All nodes must have the right bytes
        in the job, and none is drained by it.
        """
        path, nodes = self.data(name, MIB), self.cluster.nodes
        digest, before = self.sha256(path), self.read_of_store()
        job = self.start(path, nodes, f"srun sha256sum {path}")
        during(path)
        self.wait_over(job)
        self.await_stagers()
        read = self.read_of_store() - before
        lines = self.cluster.read(f"/shared/alice/out-{job}").splitlines()
        assert lines == [f"{digest}  {path}"] * len(nodes)
        self.cluster.wait_idle()  # a drained node is not
        self.source(path).unlink()
        return read / (MIB << 20)

    def run_until(
        self, name: str, most: float, during: Callable[[str], None] = lambda path: None
    ) -> float:
        """The same, again while more than `most` was read, a few times."""
        for number in range(ATTEMPTS):
            self.reset_caches()
            read = self.run_job(f"{name}-{number}", during)
            if read <= most:
                break
        return read

    def reset_caches(self) -> None:
        for node in self.cluster.nodes:
            self.root(["rm", "-rf", "/mnt/nvme/forestage"], node)


@pytest.fixture(scope="module")
def services(machine: None) -> Iterator[Installed]:
    spec = dataclasses.replace(networked(NODES, LINKS), companion="")
    with Cluster.up(spec) as cluster:
        fleet = Installed(cluster)
        fleet.configure()
        fleet.serve(cluster.nodes)
        yield fleet
        fleet.end_services()


@pytest.fixture
def fleet(services: Installed) -> Iterator[Installed]:
    services.reset()
    yield services
    services.mend()
    missing = [node for node in services.cluster.nodes if node not in services._services]
    services.serve(missing)
    services.cluster.wait_idle()
    services.await_stagers()
    assert services.leftovers() == []


def test_nodes_with_only_sources_set_read_the_source_once(fleet: Installed) -> None:
    assert fleet.run_until("once", ONCE) <= ONCE


def test_half_equipped_cluster_has_right_bytes_and_no_finding_that_fails(fleet: Installed) -> None:
    """Half of the nodes have no service, one of them no forestage at all.

    What those read is theirs alone; the other nodes may each read the shares that the half without
    would have had.
    """
    bare, *without = fleet.cluster.nodes[NODES // 2 :]
    others = [node for node in fleet.cluster.nodes if node != bare]
    before = {node: fleet.failing(node) for node in others}
    fleet.end_services([bare, *without])
    fleet.root(["mount", "-t", "tmpfs", "tmpfs", VENV], bare)
    try:
        most = NODES - 0.8
        read = fleet.run_until("half", most)
        assert {node: fleet.failing(node) for node in others} == before
    finally:
        fleet.root(["umount", VENV], bare)
    assert read <= most


def interrupt(fleet: Installed, act: Callable[[str], None]) -> Callable[[str], None]:
    """Have something happen to the second node's service once that node has a third."""
    node = fleet.cluster.nodes[1]

    def during(path: str) -> None:
        fleet.await_progress(path, node, 0.3)
        act(node)

    return during


def restart(fleet: Installed, node: str) -> None:
    fleet.start_again(node)


def kill(fleet: Installed, node: str) -> None:
    fleet.signal(node, signal.SIGKILL)


@pytest.mark.parametrize("act", [restart, kill])
def test_service_in_the_middle_of_a_copy_job_goes_on_with_right_bytes(
    fleet: Installed, act: Callable[[Installed, str], None]
) -> None:
    """The others read at most what they had left to that node; it gets its own as before."""
    node = fleet.cluster.nodes[1]
    most = NODES / 2
    try:
        read = fleet.run_until(act.__name__, most, interrupt(fleet, lambda node: act(fleet, node)))
    finally:
        fleet.start_again(node)
    assert read <= most
