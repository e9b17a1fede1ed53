"""Peers as nodes have them by default: only `sources` is set, and the service runs or not."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
from cluster import Cluster
from fleet import Fleet, networked
from jobs import CACHE, CLI
from spec import INSIDE_STATE, REPO, VENV, Net

from forestage.events import CopyOutcome
from forestage.features.peers.auth import PROTOCOL

NODES = 6
MIB = 96
# A few seconds for each copy, so that something can happen in the middle of it.
LINKS = Net(node_mbit=200, store_mbit=400)
# How much is read of the source: a machine that stands still for seconds has nodes tire of waiting
# for one another, rightly. That the bytes are right holds for each attempt.
ATTEMPTS = 3
# On a busy machine; bench/first-start shows 1.0 to 1.1.
ONCE = 1.5
# A copy of `src` whose peers speak another protocol, in the cluster's state.
OTHER_BUILD = "other-build"
# As a node of another cluster has it; the credentials of Slurm come from another munged.
OTHER_KEY = """\
while pgrep -x munged >/dev/null; do sleep 0.1; done
umask 077
head -c 128 /dev/urandom >/run/other.key
chown munge: /run/other.key
exec setpriv --reuid=munge --regid=munge --init-groups munged --force --key-file=/run/other.key \
    --pid-file=/run/munge/{node}.pid --log-file=/var/log/munge/{node}.log \
    --seed-file=/var/lib/munge/{node}.seed
"""


@dataclass(frozen=True)
class Reading:
    """How often a job read the source, and the image that each node got of others, in images."""

    source: float
    from_peers: Mapping[str, float]


class Installed(Fleet):
    """Its configuration is docs/install.md's: directories of sources, and nothing else."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._covered: dict[str, str] = {}  # by node, what another file system hides there

    def configure(self, **keys: object) -> None:
        # JSON is YAML.
        text = json.dumps({"sources": ["/shared"], **keys})
        self.cluster.write("/etc/forestage/forestage.yaml", text)

    def signal(self, node: str, number: int) -> None:
        self.cluster.signal(self._services[node], number)

    def start_again(self, node: str) -> None:
        self.end_services([node])
        self.serve([node])

    def start_other_build(self, node: str) -> None:
        """Replace the node's package by another build, as an upgrade does, and start its service.

        What runs already is of the build before.
        """
        build = self.cluster.state / OTHER_BUILD
        if not build.exists():
            shutil.copytree(REPO / "src", build, ignore=shutil.ignore_patterns("__pycache__"))
            auth = build / "forestage/features/peers/auth.py"
            changed = auth.read_text().replace(f'"{PROTOCOL}"', '"forestage-0"')
            assert changed != auth.read_text()
            auth.write_text(changed)
        self.end_services([node])
        self._cover(node, str(REPO / "src"), "--bind", str(INSIDE_STATE / OTHER_BUILD))
        self.serve([node])

    def remove_package(self, node: str) -> None:
        self.end_services([node])
        self._cover(node, VENV, "-t", "tmpfs", "tmpfs")

    def change_munge_key(self, node: str) -> None:
        self.stop_munge(node)
        self.root(["sh", "-c", OTHER_KEY.format(node=node)], node)

    def mend(self) -> None:
        for node, service in [*self._services.items()]:
            # nsenter(1) stops itself with its child, and wakes the child when it is woken.
            service.send_signal(signal.SIGCONT)
            if service.poll() is not None:
                del self._services[node]
            elif node in self._covered:
                self.end_services([node])
        for node, path in self._covered.items():
            self.root(["umount", "--lazy", path], node)
        self._covered.clear()
        super().mend()
        self.serve([node for node in self.cluster.nodes if node not in self._services])

    def _cover(self, node: str, path: str, *mount: str) -> None:
        self.root(["mount", *mount, path], node)
        self._covered[node] = path

    def failing(self, node: str) -> list[str]:
        """The findings for which a node's health check fails."""
        argv = [CLI, "check", "--json"]
        ran = self.cluster.run(argv, user="root", node=node, check=False)
        found = json.loads(ran.stdout)["findings"]
        return [one["id"] for one in found if one["level"] != "note"]

    def run_job(self, name: str, during: Callable[[str], None] = lambda path: None) -> Reading:
        """Let a job on all nodes read a new file.

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
        got = {
            node: event.outcome.from_peers / (MIB << 20)
            for node, event in self.copies(path, nodes).items()
            if isinstance(event.outcome, CopyOutcome)
        }
        return Reading(read / (MIB << 20), got)

    def run_until(
        self,
        name: str,
        most: float,
        *,
        first: Callable[[], None] = lambda: None,
        during: Callable[[str], None] = lambda path: None,
    ) -> Reading:
        """The same, after what happens `first`; again while more than `most` was read."""
        for number in range(ATTEMPTS):
            self.mend()
            self.forget_earlier_jobs()
            first()
            reading = self.run_job(f"{name}-{number}", during)
            if reading.source <= most:
                break
        return reading

    def forget_earlier_jobs(self) -> None:
        for node in self.cluster.nodes:
            self.root(["rm", "-rf", CACHE, "/run/forestage/unanswered"], node)


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
    services.cluster.wait_idle()
    services.await_stagers()
    assert services.leftovers() == []


def test_nodes_with_only_sources_set_read_the_source_once(fleet: Installed) -> None:
    assert fleet.run_until("once", ONCE).source <= ONCE


def test_peer_service_on_half_of_the_nodes_gives_right_bytes_and_no_failing_finding(
    fleet: Installed,
) -> None:
    """Half of the nodes have no service, one of them no forestage at all.

    What those read is theirs alone; the other nodes may each read the shares that the half without
    would have had.
    """
    bare, *without = fleet.cluster.nodes[NODES // 2 :]
    others = [node for node in fleet.cluster.nodes if node != bare]
    before = {node: fleet.failing(node) for node in others}

    def remove() -> None:
        fleet.remove_package(bare)
        fleet.end_services(without)

    most = NODES - 0.8
    assert fleet.run_until("half", most, first=remove).source <= most
    assert {node: fleet.failing(node) for node in others} == before


def kill(fleet: Installed, node: str) -> None:
    fleet.signal(node, signal.SIGKILL)


def stop(fleet: Installed, node: str) -> None:
    fleet.signal(node, signal.SIGSTOP)


@pytest.mark.parametrize("act", [Installed.start_again, kill, stop, Installed.start_other_build])
def test_peer_service_killed_stopped_or_restarted_during_a_copy_leaves_right_bytes(
    fleet: Installed, act: Callable[[Installed, str], None]
) -> None:
    """The others read at most what they had left to that node; it gets its own as before."""
    node = fleet.cluster.nodes[1]

    def interrupt(path: str) -> None:
        fleet.await_progress(path, node, 0.3)
        act(fleet, node)

    most = NODES / 2
    assert fleet.run_until(act.__name__, most, during=interrupt).source <= most


def test_hanging_peer_service_adds_at_most_its_share_of_source_reads(fleet: Installed) -> None:
    node, most = fleet.cluster.nodes[1], NODES / 2
    assert fleet.run_until("hangs", most, first=lambda: stop(fleet, node)).source <= most


@pytest.mark.parametrize("become", [Installed.change_munge_key, Installed.start_other_build])
def test_node_with_another_munge_key_or_build_copies_alone_and_other_nodes_without_that_node(
    fleet: Installed, become: Callable[[Installed, str], None]
) -> None:
    """Its munge has another key, or its package is another build than theirs."""
    node = fleet.cluster.nodes[1]
    most = 1 + 2 * ONCE  # its own, and less than the others would read without one another
    reading = fleet.run_until(f"alone-{become.__name__}", most, first=lambda: become(fleet, node))
    assert reading.source <= most
    assert reading.from_peers[node] == 0
