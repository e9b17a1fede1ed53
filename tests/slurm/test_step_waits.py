"""A step that waits for a copy: it starts, however long that takes, and a cancelled one ends.

All jobs run at the same time, once; each test looks at what has become of one of them.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

import pytest
from cluster import Cluster
from host import wait_until
from jobs import RELEASE, Ran, Site
from spec import ClusterSpec
from steps import SHOW, accompanied, seen_at, served, wrong

from forestage.cache.lease import Lease

SLOW = 23  # seconds; Slurm loses a step at MessageTimeout + BatchStartTimeout, 20 by default
TOLD = 40  # seconds; after 30 the user is told that it goes on
KILL_WAIT = 30  # seconds, Slurm's default: then it kills what does not end by itself
ABORTING = "plain"  # a partition of the test cluster


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied()


def slow(site: Site, seconds: int, **keys: object) -> list[str]:
    """Images of one size whose copies take so long, and the configuration that makes it so."""
    images = [site.image(f"slow{number}", mib=16, seed=number) for number in range(4)]
    size = site.source(images[0]).stat().st_size
    aborting = {ABORTING: {"on_deadline": "abort"}}
    site.configure(
        redirect="spank",
        prolog_wait="0s",
        bandwidth=size // seconds,
        chunk_size="1MiB",
        partitions=aborting,
        **keys,
    )
    return images


@dataclass
class Cancelled:
    """A step that was cancelled while it waited, the only one of its node."""

    image: str
    node: str
    leases: list[Lease] = field(default_factory=list)


@dataclass
class Scene:
    """What has become of all of them."""

    site: Site
    images: list[str]
    jobs: dict[str, Ran]
    cancelled: dict[str, Cancelled]
    states: dict[str, str]


@pytest.fixture(scope="module")
def scene(site_cluster: Cluster) -> Scene:
    site = Site(site_cluster)
    images = slow(site, SLOW)
    job_level, inner, cancelled, aborted = images
    steps = {
        "job-level": start(site, "job-level", "srun", "--nodelist=n1,n2", *of(job_level), *RELEASE),
        "inner": start(site, "inner", "salloc", "--nodelist=n2", "srun", *of(inner), *RELEASE),
    }
    ends = {
        "job": Cancelled(cancelled, "n3"),
        "aborted": Cancelled(aborted, "n4"),
    }
    where = {"job": "all", "aborted": ABORTING}
    for way, one in ends.items():
        there = [f"--nodelist={one.node}", f"--partition={where[way]}"]
        steps[way] = start(site, way, "srun", *there, *of(one.image), "true")
    for one in ends.values():
        wait_for_copy(site, one)
    for way in ends:
        site_cluster.run(["scancel", f"--name={way}"], user="root")
    for way in ends:
        steps[way].communicate(timeout=120)
    jobs = {way: over(site, way, steps[way]) for way in ("job-level", "inner")}
    queue = ["squeue", "--noheader"]
    wait_until(lambda: not site_cluster.run(queue, user="root").stdout, 90, site_cluster.overview)
    return Scene(site, images, jobs, ends, site_cluster.node_states())


def of(image: str) -> list[str]:
    return [f"--container-image={image}"]


def start(site: Site, name: str, command: str, *argv: str) -> subprocess.Popen[str]:
    return site.cluster.popen([command, f"--job-name={name}", *argv])


def over(site: Site, name: str, step: subprocess.Popen[str]) -> Ran:
    stdout, stderr = step.communicate(timeout=120)
    squeue = ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"]
    job = int(site.cluster.run(squeue, user="root").stdout)
    site.wait_over(job)
    return Ran(job, step.returncode, stdout, stderr)


def wait_for_copy(site: Site, one: Cancelled) -> None:
    """And for the step that waits for it."""
    parts = site.cache(one.node).parts
    wait_until(lambda: any(parts.glob("*/image")), 60, lambda: "no copy begins")
    wait_until(lambda: helped(site, one.node), 60, lambda: "no step waits")
    one.leases = site.leases(one.node)


def helped(site: Site, node: str) -> bool:
    """Whether the companion's helper waits there."""
    processes = site.root(["ps", "-e", "-o", "args="], node).splitlines()
    return any(process.endswith("/bin/forestage step") for process in processes)


@pytest.mark.parametrize("way", ["job-level", "inner"])
def test_a_step_starts_after_a_copy_longer_than_slurms_timeouts(scene: Scene, way: str) -> None:
    image = scene.images[0 if way == "job-level" else 1]
    ran, seen = scene.jobs[way], seen_at(scene.site, image)
    assert ran.code == 0, ran
    assert ran.stderr.count("error") == 0, ran
    assert {one.node for one in seen} == ({"n1", "n2"} if way == "job-level" else {"n2"})
    assert wrong(scene.site, image, seen) == []


def test_the_wait_was_longer_than_slurms_timeouts(scene: Scene) -> None:
    (joined,) = served(scene.site, scene.jobs["job-level"].job, "n1")
    assert joined.result == "joined"
    # That of the job level has begun in its Prolog, who knows how long before the step.
    (copied,) = served(scene.site, scene.jobs["inner"].job, "n2")
    assert copied.result == "copied"
    assert copied.wait > 20


@pytest.mark.parametrize("way", ["job", "aborted"])
def test_a_cancelled_step_does_not_wait_on(scene: Scene, way: str) -> None:
    log = scene.site.cluster.read(f"/var/log/slurm/{scene.cancelled[way].node}.log")
    assert "the step is being signalled" in log, "Slurm had to kill it"


def test_no_node_is_drained_for_a_step_that_waited(scene: Scene) -> None:
    assert not {state for state in scene.states.values() if "drain" in state or "down" in state}


def test_the_epilog_releases_what_a_cancelled_step_took(scene: Scene) -> None:
    for one in scene.cancelled.values():
        assert [len(lease.uses) for lease in one.leases] == [1]
        assert scene.site.leases(one.node) == []


def test_a_copy_goes_on_or_stops_as_configured(scene: Scene) -> None:
    site, goes_on, stops = scene.site, scene.cancelled["job"], scene.cancelled["aborted"]
    cache = site.cache(goes_on.node)
    wait_until(lambda: site.cached_paths(goes_on.node) == [goes_on.image], 90, lambda: "no entry")
    site.await_stagers()
    assert list(cache.parts.iterdir()) == []
    stopped = site.cache(stops.node)
    assert site.cached_paths(stops.node) == []
    for part in stopped.parts.iterdir():
        owner = stopped.part(part.name).owner()
        assert owner is None or not owner.lives()
    site.configure(redirect="spank")
    late = site.srun(stops.image, node=stops.node)
    assert late.code == 0
    assert site.saw(late.job).sha256 == site.sha256(stops.image)


@pytest.mark.long
def test_a_user_who_waits_long_is_told_so(site: Site) -> None:
    image = slow(site, TOLD)[0]
    step = start(site, "told", "srun", "--nodelist=n1,n2", *of(image), *RELEASE)
    ran = over(site, "told", step)
    assert ran.code == 0, ran
    told = [line for line in ran.stderr.splitlines() if "forestage: copying" in line]
    assert len(told) == 2, ran
    assert all("%" in line and image in line for line in told)


@pytest.mark.long
@pytest.mark.parametrize("signal", ["scancel", "interrupt"])
def test_the_step_alone_is_cancelled_and_the_next_one_starts(site: Site, signal: str) -> None:
    image = slow(site, SLOW)[0]
    site.source("/shared/alice/helped").unlink(missing_ok=True)
    first = f"srun --container-image={image} true & until test -e helped; do sleep 0.1; done; "
    end = {"scancel": "scancel $SLURM_JOB_ID.0", "interrupt": "kill -INT $!; kill -INT $!"}[signal]
    job = site.cluster.popen(
        ["salloc", "--nodelist=n1", "sh", "-c", f"{first}{end}; wait; echo; srun {SHOW}"]
    )
    wait_until(lambda: helped(site, "n1"), 60, lambda: "no step waits")
    began = time.monotonic()
    site.source("/shared/alice/helped").touch()
    stdout, stderr = job.communicate(timeout=120)
    assert time.monotonic() - began < KILL_WAIT, "Slurm had to kill it"
    assert "Debian" in stdout, (stdout, stderr)
    wait_until(lambda: site.cached_paths() == [image], 90, lambda: "no entry")
