"""A Prolog whose script has ended before its work: slurmd does not know its process any more."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from cluster import Cluster
from host import wait_until
from jobs import Site
from spec import ClusterSpec
from steps import SHOW, accompanied, served
from suite import SUITES, on_suite

from forestage.hooks.background_prolog import PROCESS_NAME
from forestage.system import lock

HELD = 120.0  # seconds: longer than any wait of a test
FIRST = "/shared/alice/first.sqsh"  # which each node has
SHORT = 12  # jobs of a moment


@pytest.fixture(
    scope="module",
    params=[
        "bookworm",
        *(pytest.param(s, marks=pytest.mark.suite(s)) for s in SUITES if s != "bookworm"),
    ],
)
def cluster_spec(request: pytest.FixtureRequest, machine: None) -> ClusterSpec:
    spec = accompanied(2)
    return spec if request.param == "bookworm" else on_suite(spec, request.param)


@pytest.fixture
def leaving(spank: Site) -> Iterator[Site]:
    with left_by_prologs(spank) as site:
        yield site


@contextlib.contextmanager
def left_by_prologs(site: Site) -> Iterator[Site]:
    """Each node has had a Prolog, which has written down that the next ones may leave."""
    site.configure(redirect="spank", cold="auto")
    nodes = ",".join(site.cluster.nodes)
    site.srun(site.image("first"), node=nodes, options=["--ntasks-per-node=1"])
    site.await_stagers()
    yield site
    for node in site.cluster.nodes:
        assert workers(site, node) == []
        assert marks(site, node) == []


def workers(site: Site, node: str = "n1") -> list[str]:
    return site.named(node, PROCESS_NAME)


def marks(site: Site, node: str = "n1") -> list[str]:
    """What Prologs have left for their own job's sake."""
    leases = site.cluster.host_path("/run/forestage/leases", node)
    return sorted(path.name for path in leases.iterdir())


def worker(site: Site, job: int) -> str:
    """The pid in the job's mark; what it forks to act as the user has its name, too."""
    mark = site.cluster.host_path(f"/run/forestage/leases/{job}.prolog", "n1")
    return mark.read_text().partition(" ")[0] if mark.exists() else ""


def helpers(site: Site) -> list[str]:
    """Steps that ask: one process for each."""
    return [pid for pid in site.named("n1", "python3", "forestage") if b"step" in _argv(site, pid)]


def _argv(site: Site, pid: str) -> list[bytes]:
    try:
        file = site.cluster.host_path(f"/proc/{pid}/cmdline", "n1")
        return file.read_bytes().split(b"\0")
    except OSError:
        return []


@contextlib.contextmanager
def held_up(site: Site, node: str = "n1") -> Iterator[None]:
    """No Prolog's work comes to an end meanwhile."""
    with lock.held(site.cache(node).space_lock, HELD):
        yield


def submitted(site: Site, image: str, name: str, *options: str) -> int:
    """A batch job that shows what its step sees; returns when its Prolog's process is at work."""
    script = f"#!/bin/sh\nsrun --container-image={image} {SHOW}\n"
    where = ["--nodelist=n1", f"--output={name}", f"--comment=stage={image}", *options]
    job = site.cluster.submit(script, *where)
    wait_until(lambda: bool(worker(site, job)), 60, site.cluster.overview)
    return job


@pytest.mark.always
def test_job_starts_while_its_detached_prolog_works_and_its_step_waits(leaving: Site) -> None:
    """slurmd has ended the script's process group by then."""
    with held_up(leaving):
        job = submitted(leaving, FIRST, "waits")
        wait_until(lambda: bool(helpers(leaving)), 60, lambda: "no step asks")
        assert worker(leaving, job) in workers(leaving)
        assert leaving.outcomes(job) == []
    leaving.wait_over(job)
    assert "ID=first" in leaving.cluster.read("/shared/alice/waits")
    assert leaving.outcome(job).result == "hit"
    assert {one.result for one in served(leaving, job, "n1")} == {"hit"}
    for seen in leaving.seen(job):
        assert not leaving.shows_source(seen)


def test_cold_job_on_two_nodes_reads_through_copies_begun_by_detached_prologs(
    leaving: Site,
) -> None:
    image = leaving.image("cold", mib=8)
    leaving.configure(redirect="spank", cold="auto", bandwidth="64KiB", chunk_size="1MiB")
    nodes = "n1,n2"
    leaving.srun(None, "true", node=nodes)
    ran = leaving.srun(image, node=nodes)
    assert ran.stdout.count("ID=cold") == 2
    for node in ("n1", "n2"):
        assert leaving.outcome(ran.job, node).result == "started"
    assert {seen.sha256 for seen in leaving.seen(ran.job)} == {leaving.sha256(image)}
    leaving.end_stagers()
    leaving.await_keepers()
    leaving.reset()


def test_step_gets_its_image_itself_if_the_detached_prolog_was_killed(leaving: Site) -> None:
    with held_up(leaving):
        job = submitted(leaving, FIRST, "killed")
        leaving.root(["kill", "-KILL", worker(leaving, job)], "n1")
    leaving.wait_over(job)
    assert leaving.outcomes(job) == []
    assert "ID=first" in leaving.cluster.read("/shared/alice/killed")
    assert "hit" in {one.result for one in served(leaving, job, "n1")}


def test_requeue_ends_the_detached_prolog_and_the_job_is_served_on_another_node(
    leaving: Site,
) -> None:
    """On another node: for two minutes, this slurmd would take it for the one that it has ended."""
    squeue = ["squeue", "--noheader", "--format=%T %r", "--job"]
    with held_up(leaving):
        job = submitted(leaving, FIRST, "requeued", "--requeue", "--open-mode=truncate")
        pid = worker(leaving, job)
        leaving.cluster.run(["scontrol", "requeue", str(job)], user="root")
        wait_until(lambda: pid not in workers(leaving), 60, lambda: "the Epilog kills nobody")
    wait_until(
        lambda: leaving.root([*squeue, str(job)], "n1") == "PENDING BeginTime\n",
        60,
        leaving.cluster.overview,
    )
    update = ["scontrol", "update", f"JobId={job}", "ReqNodeList=n2", "StartTime=now"]
    leaving.root(update, "n1")
    leaving.wait_over(job)
    assert "ID=first" in leaving.cluster.read("/shared/alice/requeued")
    assert leaving.outcomes(job) == []
    assert [one.result for one in leaving.outcomes(job, "n2")] == ["hit"]


def test_cancelling_a_job_ends_its_detached_prolog(leaving: Site) -> None:
    with held_up(leaving):
        job = submitted(leaving, FIRST, "cancelled")
        pid = worker(leaving, job)
        leaving.cluster.run(["scancel", str(job)], user="root")
        wait_until(lambda: pid not in workers(leaving), 60, lambda: "the Epilog kills nobody")
    leaving.wait_over(job)
    assert leaving.outcomes(job) == []


def test_jobs_cancelled_at_any_moment_leave_no_prolog_mark(leaving: Site) -> None:
    """Before the script, between it and its process, beside the Epilog."""
    where = ["--nodelist=n1", "--output=/dev/null", f"--comment=stage={FIRST}"]
    jobs = []
    for number in range(SHORT):
        script = f"#!/bin/sh\nsrun --container-image={FIRST} true\n"
        jobs.append(job := leaving.cluster.submit(script, *where))
        # Each a little later in its life than the one before.
        sleep = f"sleep {number / SHORT / 4}; scancel {job}"
        leaving.cluster.run(["sh", "-c", sleep], user="root")
    for job in jobs:
        leaving.wait_over(job)
    assert marks(leaving) == []


def test_array_of_short_jobs_reads_the_right_image_in_each_job(leaving: Site) -> None:
    script = f"#!/bin/sh\nsrun --container-image={FIRST} true\n"
    where = ["--nodelist=n1,n2", "--nodes=1-2", "--output=/dev/null", f"--array=1-{SHORT}"]
    job = leaving.cluster.submit(script, *where, f"--comment=stage={FIRST}")
    leaving.wait_over(job)
    reports = [one for one in leaving.cluster.pyxis_reports() if one["path"] == FIRST]
    looked = [one for one in reports if int(str(one["job"])) >= job]
    assert len(looked) >= SHORT
    assert {(one["error"], one["sha256"]) for one in looked} == {(None, leaving.sha256(FIRST))}


@pytest.mark.parametrize("flags", [None, "Alloc", "Alloc,DeferBatch,Serial"])
def test_hinted_job_is_a_hit_with_any_prologflags(machine: None, flags: str | None) -> None:
    """Without Alloc the Prolog runs when the job's first step is launched."""
    spec = accompanied(1)
    spec = dataclasses.replace(spec, slurm_conf={**spec.slurm_conf, "PrologFlags": flags})
    with Cluster.up(spec) as cluster:
        site = Site(cluster)
        with left_by_prologs(site):
            with held_up(site):
                job = submitted(site, FIRST, "flagged")
                wait_until(lambda: bool(helpers(site)), 60, lambda: "no step asks")
            site.wait_over(job)
            assert "ID=first" in cluster.read("/shared/alice/flagged")
            assert site.outcome(job).result == "hit"
            assert {one.result for one in served(site, job, "n1")} == {"hit"}
            cluster.wait_idle()
