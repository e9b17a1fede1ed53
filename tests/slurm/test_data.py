"""A squashfs file that a comment names for a mount point shows there in the job's steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
from host import wait_until
from jobs import Ran, Site
from spec import ClusterSpec
from steps import accompanied, served

from forestage.data.serving import PROCESS_NAME, PROGRAMS
from forestage.events import Handled, Outcome

POINT = "/shared/alice/point"
LOOK = f"cat {POINT}/etc/os-release"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(2)


@pytest.fixture
def site_of_data(spank: Site) -> Iterator[Site]:
    """Nothing of what was mounted outlives the jobs."""
    spank.cluster.run(["mkdir", "-p", POINT], user="alice")
    yield spank
    spank.cluster.wait_idle()
    wait_until(lambda: not servers(spank), 30, lambda: f"servers live on: {servers(spank)}")
    for node in spank.cluster.nodes:
        folder = spank.cluster.host_path("/run/forestage/served", node)
        assert list(folder.glob("*")) == []


def servers(site: Site, *names: str) -> list[str]:
    wanted = names or (PROCESS_NAME, *PROGRAMS)
    return [pid for node in site.cluster.nodes for pid in site.named(node, *wanted)]


def comment(image: str, point: str = POINT) -> str:
    return f"stage={image}@{point}"


def mounted(site: Site, job: Ran) -> Handled:
    """What the only step of a job says of its data."""
    (only,) = of_steps(site, job)
    return only


def of_steps(site: Site, job: Ran) -> list[Handled]:
    found: list[Outcome] = served(site, job.job, "n1")
    return [one for one in found if isinstance(one, Handled)]


def test_file_shows_at_its_mount_point_in_the_step_alone(site_of_data: Site) -> None:
    site = site_of_data
    image = site.image("env", mib=2)
    step = site.srun(
        None, "sh", "-c", f"{LOOK}; grep {POINT} /proc/self/mountinfo", comment=comment(image)
    )
    assert step.stdout.startswith('NAME="env"\nID=env\n'), step
    (line,) = step.stdout.splitlines()[2:]
    assert " ro,nosuid,nodev" in line
    assert " fuse.squashfuse " in line
    outcome = mounted(site, step)
    assert outcome.request == f"{image}@{POINT}"
    assert outcome.redirect == "spank"
    assert [one.result for one in site.outcomes(step.job)] == ["started"]
