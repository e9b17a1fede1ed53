"""The tests in this folder run on a real Slurm cluster; `site` is what most of them are given."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

# These lie beside this file, not in a package.
from cluster import Cluster  # noqa: E402
from host import exit_on_sigterm  # noqa: E402
from jobs import Site, hooked  # noqa: E402
from packaged import build  # noqa: E402
from spec import ClusterSpec  # noqa: E402
from steps import Tables  # noqa: E402

DAEMONS = ("slurmctld", "slurmd", "munged", "srun")
TOOLS = ("mksquashfs", "squashfuse", "gcc", "make", "ip", "unshare", "mkfs.ext4", "strace")
MADE = "FORESTAGE_TEST_PACKAGES"  # a folder with packages to test, instead of those made here
ALSO = "FORESTAGE_TEST_ALSO"  # set by ./test: names of suites among it


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "suite(name): on another release of Slurm; only with ./test --all or --suite"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    also = set(os.environ.get(ALSO, "").split())
    left_out = []
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            wanted = {mark.args[0] for mark in item.iter_markers("suite")}
            left_out += [item] * (not wanted <= also)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips for an ordinary user; root has no excuse, ./test installs all that is needed."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm cluster in namespaces of its own needs root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [program for program in DAEMONS + TOOLS if not shutil.which(program, path=path)]:
        pytest.fail(f"missing: {', '.join(missing)} (run tests/prepare)")
    exit_on_sigterm()


@pytest.fixture(scope="session")
def built(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages, made here; or those in a folder that the environment names."""
    if MADE in os.environ:
        return Path(os.environ[MADE])
    folder = tmp_path_factory.mktemp("packages")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    """What `site` runs on; a module with a fixture of the same name has its own."""
    return hooked(BatchStartTimeout="60")  # so that a slow machine is no missed deadline


@pytest.fixture(scope="module")
def site_cluster(machine: None, cluster_spec: ClusterSpec) -> Iterator[Cluster]:
    with Cluster.up(cluster_spec) as cluster:
        yield cluster


@pytest.fixture
def site(site_cluster: Cluster) -> Iterator[Site]:
    """Nodes with empty caches. Whatever the test's jobs have met, no trace of it may stay."""
    site = Site(site_cluster)
    site.reset()
    yield site
    try:
        site_cluster.wait_idle()  # a drained node is not idle
        site.await_stagers()
        assert site.leftovers() == []
    finally:
        # Else one job left running, or one node drained, fails all tests after this one.
        site_cluster.run(["scancel", "--user=alice"], user="root", check=False)
        site_cluster.run(["scancel", "--user=bob"], user="root", check=False)
        resume = ["scontrol", "update", "NodeName=ALL", "State=RESUME"]
        site_cluster.run(resume, user="root", check=False)


@pytest.fixture
def spank(site: Site) -> Iterator[Site]:
    """A Prolog that neither waits nor mounts; a step's redirect shows in no node's own table."""
    site.configure(redirect="spank")
    with Tables(site) as tables:
        yield site
        site.cluster.wait_idle()
        if "JobContainerType" not in site.cluster.spec.slurm_conf:  # it mounts for itself
            assert tables.changed() == []
