"""Nodes of one job help one another: over links of their own, whatever happens to some of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster
from fleet import Fleet, networked
from host import wait_until
from jobs import CLI
from mishaps import MISHAPS, meet
from spec import ALICE, Net

from forestage.features.prefetch import expected_list
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.paths import NodePaths
from forestage.units import format_size

NODES = 5
MIB = 16
# Some seconds a job, and little work for the processors that all nodes share.
LINKS = Net(node_mbit=100, store_mbit=200)
FIRST = ("killed-50", "wrong-bytes", "no-munge")
THEN = ("vanished", "slow", "older-version", "late", "source-fails", "port-taken")
# How much is read of the source: a machine that stands still for seconds has nodes tire of waiting
# for one another, rightly. That the bytes are right holds for each.
ATTEMPTS = 3

# Says who it is by this credential, and then asks for everything.
STRANGER = """
import http.client, json, sys
node, key, credential = sys.argv[1:]
def ask(method, path, body=None):
    line = http.client.HTTPConnection(node, 7717, timeout=10)
    line.request(method, path, body)
    return line.getresponse().status
seen = [ask("POST", "/v1/session", credential.encode())] if credential else []
chunk = f"/v1/chunk/{key}/0"
paths = [chunk, "/", "/v1/chunk/", "/v1/chunk/../../../../etc/passwd", "/v1/%2e%2e/etc/shadow"]
print(json.dumps(seen + [ask("GET", path) for path in paths]))
"""


@pytest.fixture(scope="module")
def net_cluster(machine: None) -> Iterator[Cluster]:
    with Cluster.up(networked(NODES, LINKS)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def services(net_cluster: Cluster) -> Iterator[Fleet]:
    fleet = Fleet(net_cluster)
    fleet.configure()
    fleet.serve(net_cluster.nodes)
    yield fleet
    fleet.end_services()


@pytest.fixture
def fleet(services: Fleet) -> Iterator[Fleet]:
    services.reset()
    yield services
    at_rest(services)


def at_rest(fleet: Fleet) -> None:
    fleet.cluster.wait_idle()
    fleet.await_stagers()
    assert fleet.leftovers() == []


@pytest.mark.always
def test_nodes_with_peers_together_read_the_source_once(fleet: Fleet) -> None:
    nodes, size = fleet.cluster.nodes, MIB << 20
    for number in range(ATTEMPTS):
        path = fleet.data(f"once-{number}", MIB)
        digest, before = fleet.sha256(path), fleet.read_of_store()
        job = fleet.start(path, nodes, f"srun sha256sum {path}")
        outcomes = [event.outcome for event in fleet.await_copies(path, nodes).values()]
        fleet.wait_over(job)
        read = fleet.read_of_store() - before
        assert fleet.wrong(path, nodes) == []
        lines = fleet.cluster.read(f"/shared/alice/out-{job}").splitlines()
        assert lines == [f"{digest}  {path}"] * NODES
        assert [one.result for one in outcomes] == ["copied"] * NODES
        if read < 1.5 * size:
            break
        at_rest(fleet)

    # As many as nodes without peers; bench/peers shows 1.0 to 1.1.
    assert read < 1.5 * size
    got = sum(one.from_peers for one in outcomes)
    assert got >= (NODES - 1.5) * size
    assert "MiB from the file server" in fleet.command("explain", str(job))


def test_nodes_without_peers_each_read_the_whole_source(fleet: Fleet) -> None:
    """Else the other tests would prove nothing."""
    fleet.configure(peers={"enabled": False})
    nodes = fleet.cluster.nodes[:2]
    path = fleet.data("direct", MIB)
    before = fleet.read_of_store()
    job = fleet.start(path, nodes)
    fleet.await_copies(path, nodes)
    assert fleet.read_of_store() - before >= 2 * MIB << 20
    fleet.wait_over(job)


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.ci) for name in THEN)]
)
def test_mishap_of_a_peer_during_a_copy_leaves_healthy_nodes_with_right_bytes(
    fleet: Fleet, name: str
) -> None:
    for number in range(ATTEMPTS):
        told = meet(fleet, name, fleet.cluster.nodes, MIB, number)
        assert told.wrong == []
        assert {one.result for one in told.outcomes.values()} == {"copied"}
        if told.source < 1 + MISHAPS[name].source:
            break
        at_rest(fleet)
    assert told.source < 1 + MISHAPS[name].source


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MISHAPS if name not in (*FIRST, *THEN, "none")])
def test_mishap_of_a_peer_at_other_moments_leaves_healthy_nodes_with_right_bytes(
    fleet: Fleet, name: str
) -> None:
    test_mishap_of_a_peer_during_a_copy_leaves_healthy_nodes_with_right_bytes(fleet, name)


def test_peer_service_exits_and_names_its_port_if_the_port_is_in_use(fleet: Fleet) -> None:
    done = fleet.cluster.run(
        ["/usr/lib/forestage/bin/forestage", "peer"], user="root", node="n1", check=False
    )
    assert done.returncode not in (0, 1)
    assert "port 7717 of n1 is taken by another program" in done.stderr


def test_peer_service_refuses_requests_without_valid_root_credentials(fleet: Fleet) -> None:
    path = fleet.data("private", 1)
    job = fleet.start(path, ["n1"])
    fleet.await_copies(path, ["n1"])
    fleet.wait_over(job)
    (key,) = fleet.entries("n1")

    def asks(credential: str) -> list[int]:
        argv = ["python3", "-c", STRANGER, "n1", key, credential]
        answer: list[int] = json.loads(fleet.cluster.run(argv, node="n2").stdout)
        return answer

    def made_by(user: str, *options: str) -> str:
        return fleet.cluster.run(["munge", *options], user=user, node="n2", input=key).stdout

    nothing = [401, 404, 404, 404, 404]
    assert asks("") == nothing
    assert asks(made_by("alice")) == [403, *nothing]
    assert asks(made_by("alice", "--restrict-uid=0")) == [403, *nothing]
    # Root's, but made for something else.
    old = json.dumps({"protocol": "forestage-0", "key": key, "secret": "00" * 32})
    root = fleet.cluster.run(["munge"], user="root", node="n2", input=old).stdout
    assert asks(root) == [403, *nothing]
    # JobState once a second, not for each.
    wait_until(lambda: "refused=" in fleet.service_said("n1"), 60, lambda: "no word of it")


def peering(reach: str) -> dict[str, object]:
    return {"enabled": True, "listen": "{node}", "reach": reach}


@pytest.fixture
def of_cluster(fleet: Fleet) -> Iterator[Fleet]:
    """Nodes of other jobs are asked, too: each node has its list from Slurm."""

    def configure(reach: str) -> None:
        fleet.configure(peers=peering(reach))
        fleet.end_services()
        fleet.serve(fleet.cluster.nodes)

    configure("cluster")
    for node in fleet.cluster.nodes:
        fleet.root([CLI, "sweep"], node)
    yield fleet
    fleet.mend()
    configure("job")


@pytest.mark.ci  # with agents and no Slurm: features/peers/hooks/test_peer_cluster.py
def test_jobs_on_different_nodes_with_cluster_peers_read_the_source_once(of_cluster: Fleet) -> None:
    fleet, size = of_cluster, 4 * MIB << 20
    for number in range(ATTEMPTS):
        path = fleet.data(f"of-all-{number}", 4 * MIB)
        before = fleet.read_of_store()
        for node in fleet.cluster.nodes[:4]:
            job = fleet.start(path, [node], f"srun sha256sum {path}")
            fleet.await_copies(path, [node])
            fleet.wait_over(job)
            assert fleet.wrong(path, [node]) == []
        read = fleet.read_of_store() - before
        outcomes = [fleet.copies(path, [node])[node].outcome for node in fleet.cluster.nodes[:4]]
        taken = sum(one.size - one.from_peers for one in outcomes)
        if max(taken, read / 1.2) < 1.05 * size:
            break
    assert taken < 1.05 * size
    assert read < 1.25 * size, "GlusterFS itself has some MiB a job"
    # Some chunks are read while the first node's answer is still awaited.
    read_by_last = outcomes[-1].size - outcomes[-1].from_peers
    said = f"; {format_size(read_by_last) if read_by_last else 0} of 64 MiB from the file server"
    assert said in fleet.command("explain", str(job), node=node)


@pytest.mark.ci  # pure: features/peers/unit/test_schedule.py
def test_nodes_that_prefetch_an_image_at_once_together_read_the_source_about_twice(
    of_cluster: Fleet,
) -> None:
    """n1 has the list of what jobs wait for; all others pass at the same time.

    The first reads all of it, the second a half, then a third, and a quarter.
    """
    fleet, size = of_cluster, 4 * MIB << 20
    nodes = fleet.cluster.nodes[1:]
    for number in range(ATTEMPTS):
        fleet.configure(peers=peering("cluster"), prefetch={"host": "n1", "bandwidth": "1GiB"})
        path = fleet.data(f"ahead-{number}", 4 * MIB)
        hour_ago = time.time() - 3600
        os.utime(fleet.source(path), (hour_ago, hour_ago))
        now, all_nodes = time.time(), ",".join(fleet.cluster.nodes)
        rows = (ExpectedStarts("all", path, ALICE.uid, 3.0),)
        listed = ExpectedImageList(
            int(now * 1000), now, now + expected_list.LIST_LASTS, {"all": all_nodes}, rows
        )
        expected_list.write_list(NodePaths(fleet.cluster.host_path("/", "n1")), listed)
        before = fleet.read_of_store()
        passes = [
            fleet.cluster.popen([CLI, "prefetch", "--node", node], user="root", node=node)
            for node in nodes
        ]
        for one in passes:
            said = one.communicate(timeout=120)
            assert one.returncode == 0, said
        # A pass waits for no copy that it begins.
        copies = [one.outcome for one in fleet.await_copies(path, nodes).values()]
        read = fleet.read_of_store() - before
        assert fleet.wrong(path, nodes) == []
        taken = sum(one.size - one.from_peers for one in copies)
        if max(taken, read / 1.1) < 2.4 * size:
            break
        fleet.reset()
    assert taken < 2.4 * size
    assert read < 2.7 * size, "GlusterFS reads some MiB more"


def test_job_reads_the_source_if_the_nodes_with_the_entry_are_dead(of_cluster: Fleet) -> None:
    fleet, (first, second, *_) = of_cluster, of_cluster.cluster.nodes
    path = fleet.data("of-the-dead", MIB)
    fleet.wait_over(fleet.start(path, [first]))
    fleet.await_copies(path, [first])
    fleet.kill(first)
    job = fleet.start(path, [second])
    copy = fleet.await_copies(path, [second])[second].outcome
    assert (copy.result, copy.from_peers) == ("copied", 0)
    assert fleet.wrong(path, [second]) == []
    fleet.wait_over(job)
