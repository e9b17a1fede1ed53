"""A real network file system whose server takes root for nobody, over a slow link of its own."""

from __future__ import annotations

import os

import net
import pytest
from cluster import ClusterError
from fleet import Fleet, networked
from host import wait_until
from jobs import Ran, Site
from spec import ALICE, STORE, ClusterSpec, Net

pytestmark = pytest.mark.long

CLOSED = "/shared/alice/closed"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return networked(2, Net(node_mbit=100, store_mbit=100, squash=True))


@pytest.fixture
def fleet(site: Site) -> Fleet:
    """Nobody but alice may enter `CLOSED`."""
    fleet = Fleet(site.cluster)
    fleet.configure(peers={})
    folder = fleet.source(CLOSED)
    folder.mkdir(exist_ok=True)
    os.chown(folder, ALICE.uid, ALICE.uid)
    folder.chmod(0o700)
    return fleet


def put(fleet: Fleet, name: str, mib: int = 2) -> str:
    """An image that nobody but alice may read; its path."""
    path = f"{CLOSED}/{name}"
    made = fleet.source(fleet.data(name, mib))
    made.chmod(0o600)
    made.replace(fleet.source(path))
    return path


def read_in_a_job(fleet: Fleet, path: str, user: str = "alice") -> Ran:
    return fleet.run(["srun", f"--comment=stage={path}", "sha256sum", path], user=user)


def test_image_that_root_may_not_read_is_staged_for_its_owner_alone(fleet: Fleet) -> None:
    path = put(fleet, "private")
    with pytest.raises(ClusterError, match="Permission denied"):
        fleet.root(["cat", path], "n1")

    for result in ("copied", "hit"):
        ran = read_in_a_job(fleet, path)
        assert ran.stdout.split() == [fleet.sha256(path), path]
        outcome = fleet.outcome(ran.job)
        assert (outcome.result, outcome.redirect) == (result, "mounted")
    assert fleet.wrong(path, ["n1"]) == []

    ran = read_in_a_job(fleet, path, "bob")
    assert ran.code != 0
    assert fleet.outcome(ran.job).reason == "no-permission"
    assert fleet.redirected() == []


def test_rsync_engine_declines_an_image_that_root_cannot_read(fleet: Fleet) -> None:
    fleet.configure(peers={}, engine="rsync")
    path = put(fleet, "rsync")
    ran = read_in_a_job(fleet, path)
    assert ran.stdout.split() == [fleet.sha256(path), path]
    assert fleet.outcome(ran.job).reason == "source-error"
    assert fleet.entries() == {}


def test_copy_completes_after_a_network_cut_during_which_the_job_reaches_its_deadline(
    fleet: Fleet,
) -> None:
    fleet.configure(peers={}, deadline="2s")
    path = put(fleet, "long", mib=48)
    job = fleet.start(path, ["n1"])
    fleet.await_progress(path, "n1", 0.1)
    link = ["ip", "link", "set", net.port(STORE)]
    fleet.cluster.run([*link, "down"], user="root")
    try:
        wait_until(lambda: fleet.outcomes(job) != [], 60, lambda: fleet.logs(["n1"]))
    finally:
        fleet.cluster.run([*link, "up"], user="root")
    assert fleet.outcome(job).reason == "deadline"
    fleet.wait_over(job)
    assert fleet.await_copies(path, ["n1"])["n1"].outcome.result == "copied"
    assert fleet.wrong(path, ["n1"]) == []
