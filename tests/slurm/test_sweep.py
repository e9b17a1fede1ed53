"""The sweep and a real Slurm: whose lease goes, whose stays, and what silence means."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import pytest
from cluster import Cluster
from host import wait_until
from jobs import CLI, Site, hooked
from spec import ClusterSpec
from suite import on_suite

NEVER = 99999  # no job had this number yet
CONF = "/etc/slurm/impatient.conf"


# What squeue says is all that the sweep knows: asked of other releases, too.
ELSEWHERE = [
    pytest.param(suite, marks=[pytest.mark.long, pytest.mark.suite(suite)])
    for suite in ("trixie", "sid")
]


@pytest.fixture(scope="module", params=["bookworm", *ELSEWHERE])
def cluster_spec(request: pytest.FixtureRequest) -> ClusterSpec:
    spec = hooked(nodes=2)
    if request.param != "bookworm":
        spec = on_suite(spec, request.param)
    # Heterogeneous jobs are started by the backfill scheduler alone: every 30 s by default.
    conf = {**spec.slurm_conf, "SchedulerParameters": "bf_interval=1"}
    return dataclasses.replace(spec, slurm_conf=conf)


@pytest.fixture(scope="module", autouse=True)
def _impatient(site_cluster: Cluster) -> None:
    """slurm.conf for the commands: they give a silent slurmctld up after seconds."""
    conf = site_cluster.read("/etc/slurm/slurm.conf")
    site_cluster.write(CONF, f"{conf}MessageTimeout=2\n")


def sweep(site: Site, *words: str, node: str = "n1", conf: str = "") -> tuple[int, list[int], str]:
    """Its exit status, the jobs whose leases it released, and what it says of Slurm."""
    argv, env = [CLI, "sweep", "--json", *words], {"SLURM_CONF": conf} if conf else {}
    ran = site.cluster.run(argv, user="root", node=node, env=env, check=False)
    printed = json.loads(ran.stdout)
    assert printed["problems"] == []
    return ran.returncode, [one["job"] for one in printed["released"]], printed["doubt"]


def leased(site: Site, node: str = "n1") -> list[int]:
    return sorted(lease.job for lease in site.leases(node))


def forge(site: Site, job: int, node: str = "n1") -> None:
    """A lease as that job's Prolog would have left it."""
    (any_other, *_) = site.leases(node)
    folder = "/run/forestage/leases"
    text = site.cluster.read(f"{folder}/{any_other.job}.json", node)
    forged = text.replace(f'"job":{any_other.job}', f'"job":{job}')
    site.cluster.write(f"{folder}/{job}.json", forged, node=node, mode=0o600)


def state(site: Site, job: int) -> str:
    squeue = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    return site.root(squeue, "n1").strip()


@contextlib.contextmanager
def dead_slurmd(site: Site, node: str) -> Iterator[None]:
    """kill -9 of a node's slurmd and step managers, and what they ran; its /run stays."""
    theirs = "$(cat /run/slurmd.pid) $(ps -C slurmstepd -o pid=) $(ps -u alice -o pid=)"
    # In the node's own PID namespace: nobody else's are seen there.
    site.cluster.run(["sh", "-c", f"kill -9 {theirs}"], user="root", node=node, check=False)
    try:
        yield
    finally:
        site.root(["slurmd", "-N", node], node)


def down(site: Site, node: str) -> None:
    """What the admin does, or slurmctld after SlurmdTimeout."""
    site.root(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=dead"], node)


def test_sweep_releases_a_lease_after_a_killed_slurmd_once_slurm_has_ended_the_job(
    site: Site,
) -> None:
    image = site.image("a")
    options = [f"--container-image={image}", "--nodelist=n1", "--output=/dev/null"]
    script = "#!/bin/sh\ntouch /shared/alice/began\nsleep 600\n"
    job = site.cluster.submit(script, *options, "--no-requeue")
    began = site.source("/shared/alice/began")
    wait_until(began.exists, 60, lambda: site.cluster.overview())
    with dead_slurmd(site, "n1"):
        assert (leased(site), site.redirected()) == ([job], [image])
        assert sweep(site) == (0, [], ""), "Slurm does not know it yet"
        site.root(["scancel", str(job)], "n1")
        wait_until(lambda: state(site, job) == "COMPLETING", 60, lambda: state(site, job))
        assert sweep(site) == (0, [], ""), "its Epilog may still come"
        down(site, "n1")
        wait_until(lambda: state(site, job) == "CANCELLED", 60, lambda: state(site, job))
        assert sweep(site, "--dry-run") == (0, [job], "")
        assert (leased(site), site.redirected()) == ([job], [image])
        assert sweep(site) == (0, [job], "")
        assert (leased(site), site.redirected()) == ([], [])
    (outcome,) = site.outcomes(job, hook="sweep")
    assert (outcome.unmounted, outcome.detail) == (1, "the job is CANCELLED")
    assert "the job is CANCELLED" in site.command("explain", str(job))


@pytest.mark.long
def test_sweep_keeps_the_leases_of_running_jobs_of_every_kind(site: Site) -> None:
    """Tasks of an array and parts of a heterogeneous job have numbers of their own."""
    hint = f"--comment=stage={site.image('a')}"
    wait = "until test -e /shared/alice/enough; do sleep 0.1; done"
    script = f"#!/bin/sh\n{wait}\n"
    with site.holding(None, comment=hint.partition("=")[2]) as held:
        site.cluster.submit(script, hint, "--nodelist=n1", "--array=0-1", "--output=/dev/null")
        parts = [hint, "--nodelist=n1", "--output=/dev/null", ":", hint, "--nodelist=n2"]
        site.cluster.submit(script, *parts)
        # A job without any step, as salloc has it while its user thinks.
        idle = site.cluster.popen(["salloc", "--nodelist=n1", hint, "sh", "-c", wait])
        wait_until(
            lambda: (len(leased(site)), len(leased(site, "n2"))) == (5, 1),
            60,
            lambda: site.cluster.overview(),
        )
        for node in site.cluster.nodes:
            before = leased(site, node)
            forge(site, NEVER, node)
            assert sweep(site, node=node) == (0, [NEVER], "")
            assert leased(site, node) == before
        site.cluster.write("/shared/alice/enough", "")
        held.stop()
        assert idle.wait(30) == 0
        site.cluster.wait_idle()


def test_sweep_releases_no_lease_if_slurmctld_is_silent_or_does_not_know_the_node(
    site: Site,
) -> None:
    with site.holding(site.image("a")):
        forge(site, NEVER)
        before = leased(site)
        with stopped_slurmctld(site):
            code, released, doubt = sweep(site, conf=CONF)
        assert (code, released, leased(site)) == (8, [], before)
        assert "slurm controller" in doubt
        elsewhere = site.cluster.read(f"/run/forestage/leases/{NEVER}.json", "n1")
        forged = elsewhere.replace('"node":"n1"', '"node":"x1"')
        site.cluster.write(f"/run/forestage/leases/{NEVER}.json", forged, node="n1", mode=0o600)
        code, released, doubt = sweep(site)
        assert (code, released, leased(site)) == (8, [], before)
        assert "has no node x1" in doubt
        site.cluster.write(f"/run/forestage/leases/{NEVER}.json", elsewhere, node="n1", mode=0o600)
        assert sweep(site) == (0, [NEVER], "")


@contextlib.contextmanager
def stopped_slurmctld(site: Site) -> Iterator[None]:
    # Killed at once it may forget a job that has just begun, and squeue would not wait for it.
    script = "pid=$(cat /run/slurmctld.pid); kill $pid; while kill -0 $pid; do sleep 0.05; done"
    site.cluster.run(["sh", "-c", script], user="root")
    try:
        yield
    finally:
        site.cluster.run(["slurmctld"], user="root")
        ping = ["scontrol", "ping"]
        wait_until(
            lambda: "is UP" in site.cluster.run(ping, user="root", check=False).stdout,
            60,
            lambda: site.cluster.logs(),
        )


@pytest.mark.long
def test_sweep_releases_the_lease_of_a_job_requeued_to_another_node(site: Site) -> None:
    hint = f"--comment=stage={site.image('a')}"
    wait = "until test -e /shared/alice/done; do sleep 0.1; done"
    script = f"#!/bin/sh\ntouch /shared/alice/launched\n{wait}\n"
    job = site.cluster.submit(script, hint, "--requeue", "--output=/dev/null", "--nodelist=n1")
    launched = site.source("/shared/alice/launched")
    wait_until(launched.exists, 30, lambda: site.cluster.overview())  # its Prolog is over
    assert leased(site) == [job]
    with dead_slurmd(site, "n1"):
        down(site, "n1")
        wait_until(lambda: state(site, job) == "PENDING", 30, lambda: state(site, job))
        assert sweep(site) == (0, [], ""), "it may come back"
        update = ["scontrol", "update", f"JobId={job}", "ReqNodeList=n2", "StartTime=now"]
        site.root(update, "n1")
        wait_until(lambda: leased(site, "n2") == [job], 60, lambda: site.cluster.overview())
        assert sweep(site) == (0, [job], "")
        assert sweep(site, node="n2") == (0, [], "")
        assert (leased(site), leased(site, "n2")) == ([], [job])
    site.cluster.write("/shared/alice/done", "")
    site.wait_over(job)
