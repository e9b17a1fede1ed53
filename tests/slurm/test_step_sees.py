"""However a step asks for its image: the node's copy, made once, and nothing mounted on the node.

The same with the two settings of Slurm that give a job namespaces or a step of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass

import images
import pytest
from cluster import Cluster
from host import wait_until
from jobs import CLI, Site
from spec import ALICE, INSIDE_STATE, ClusterSpec
from steps import (
    SHOW,
    TASKS,
    WAYS,
    Asked,
    Tables,
    accompanied,
    all_ways,
    seen_at,
    served,
    wrong,
)

from parking import with_fuse

OWN_TMP = {"/etc/slurm/job_container.conf": "AutoBasePath=true\nBasePath=/var/lib/containers\n"}


# A site with job_container/tmpfs has what `Contain` brings as well.
SETTINGS = (
    "plain",
    pytest.param("contain", marks=pytest.mark.long),
    pytest.param("tmpfs", marks=pytest.mark.ci),
)


@pytest.fixture(scope="module", params=SETTINGS)
def cluster_spec(request: pytest.FixtureRequest) -> ClusterSpec:
    if request.param == "plain":
        return accompanied()
    if request.param == "contain":
        return accompanied(2, PrologFlags="Alloc,Contain")
    spec = accompanied(2, PrologFlags="Alloc,Contain", JobContainerType="job_container/tmpfs")
    node_dirs = (*spec.node_dirs, "/var/lib/containers")
    return dataclasses.replace(spec, files={**spec.files, **OWN_TMP}, node_dirs=node_dirs)


@pytest.fixture(scope="module")
def site_cluster(machine: None, cluster_spec: ClusterSpec) -> Iterator[Cluster]:
    """All of it on one core if jobs get namespaces: Linux 6.18 numbers those by core, and refuses
    to bind, as job_container/tmpfs does, one that has a lower number than the caller's own."""
    cores = os.sched_getaffinity(0)
    if "JobContainerType" in cluster_spec.slurm_conf:
        os.sched_setaffinity(0, {min(cores)})
    try:
        cluster = Cluster.up(cluster_spec)
    finally:
        os.sched_setaffinity(0, cores)
    with cluster:
        yield cluster


@dataclass(frozen=True)
class Ways:
    """One job for each way of asking, all of them over."""

    site: Site
    asked: dict[str, Asked]
    changed: list[str]


@pytest.fixture(scope="module")
def ways(site_cluster: Cluster) -> Ways:
    site = Site(site_cluster)
    site.configure(redirect="spank")
    with Tables(site) as tables:
        asked = all_ways(site)
        site_cluster.wait_idle()
        return Ways(site, asked, tables.changed())


@pytest.mark.always
@pytest.mark.parametrize("way", WAYS)
def test_step_sees_its_nodes_copy_however_the_image_is_requested(ways: Ways, way: str) -> None:
    asked = ways.asked[way]
    lines = asked.ran.stdout.splitlines()
    assert lines == [f'NAME="{way}"', f"ID={way}"] * (len(lines) // 2) != [], asked.ran
    assert asked.wrong == []
    assert {one.node for one in asked.seen} == {asked.node}
    assert way != "many-tasks" or len(asked.seen) == TASKS


def test_prolog_that_sees_the_image_option_starts_the_copy_and_the_step_joins(ways: Ways) -> None:
    asked = ways.asked["srun"]
    prolog = ways.site.outcome(asked.ran.job, asked.node)
    assert (prolog.result, prolog.redirect) == ("started", "spank")
    steps = served(ways.site, asked.ran.job, asked.node)
    assert steps, "the companion did not ask"
    assert {one.result for one in steps} <= {"joined", "hit"}


def test_steps_leave_no_mounts_and_no_leftovers_on_the_nodes(
    ways: Ways, cluster_spec: ClusterSpec
) -> None:
    if "JobContainerType" not in cluster_spec.slurm_conf:  # it mounts for itself
        assert ways.changed == []
    assert ways.site.leftovers() == []


def test_redirect_of_a_running_step_is_not_mounted_on_the_node(spank: Site) -> None:
    image = spank.image("held")
    with spank.holding(image) as held:
        assert wrong(spank, image, spank.seen(held.job)) == []
        assert spank.redirected() == []
        assert [lease.job for lease in spank.leases()] == [held.job]
        assert image in spank.command("status")
    assert spank.leases() == []


def test_image_in_the_comment_is_redirected_in_the_batch_script_and_its_steps(spank: Site) -> None:
    """As a user needs it who runs enroot by hand, with `redirect:` as it is by default."""
    spank.configure(redirect="auto")
    image = spank.image("hinted")
    look = f"stat -c %i {image}"
    comment = f"--comment=stage={image}"
    assert spank.sbatch("true", comment).code == 0
    spank.await_stagers()
    job = spank.sbatch(f"{look}\nsrun {look}", comment)
    shown = set(map(int, job.stdout.split()))
    assert len(job.stdout.split()) == 2
    assert len(shown) == 1
    assert shown != {spank.source(image).stat().st_ino}
    assert [one.result for one in served(spank, job.job, "n1")] == ["hit", "hit"]


def test_outcome_of_hints_and_image_is_printed_once_and_in_the_tasks_environment(
    spank: Site,
) -> None:
    image = spank.image("told", mib=2)
    show = "sh -c 'echo $SLURMD_NODENAME $FORESTAGE_RESULT $FORESTAGE_IMAGE_PATH.'"
    assert spank.srun(image, node="n1,n2").code == 0
    comment = "--comment=stage-tell=yes stage-wait=10parsecs stage=/typo"
    step = f"srun --container-image={image} {show}"
    job = spank.sbatch(f"{show}\n{step}\n{step}\nsrun {show}", comment, node="n1,n2")
    said = [line for line in job.stdout.splitlines() if "forestage: " in line]
    assert [line.partition("forestage: n1: ")[2][:30] for line in said] == [
        "ignored in --comment: stage-wait: expected"[:30],
        "stage=/typo is not staged: /typo does not exist"[:30],
        f"{image} is read from this node's copy"[:30],
    ], job.stdout
    worth = ("saves about", "costs about", "as fast as", "not known")
    assert any(word in said[-1] for word in worth)
    found = sorted(line for line in job.stdout.splitlines() if line[:3] in ("n1 ", "n2 "))
    shown = [f"{node} hit {image}." for node in ("n1", "n1", "n2", "n2")]
    assert found == sorted([*shown, "n1 .", "n1 .", "n2 ."]), "nothing where no image is"


def test_explain_without_root_shows_only_the_users_own_jobs(spank: Site) -> None:
    image = spank.image("mine")
    job = spank.srun(image)

    def run(user: str, *words: str) -> tuple[int, str, str]:
        ran = spank.cluster.run([CLI, *words], user=user, node="n1", check=False)
        return ran.returncode, ran.stdout, ran.stderr

    alice, bob = run("alice", "explain", f"{job.job}.0"), run("bob", "explain", str(job.job))
    assert alice[1] == spank.command("explain", str(job.job))
    assert "saved" in alice[1]
    assert bob[:2] == (1, "")
    assert f"nothing is recorded about your job {job.job}" in bob[2]


def test_explain_by_srun_overlap_shows_the_users_running_job(spank: Site) -> None:
    """As docs/users.md writes it: a step of the job, which takes no place of its own."""
    image = spank.image("running")
    ask = "srun --jobid=$SLURM_JOB_ID --overlap -w n1 --quiet"
    job = spank.sbatch(
        f"srun --container-image={image} true\n{ask} {CLI} explain $SLURM_JOB_ID", node="n1"
    )
    assert f"Job {job.job} of alice on n1" in job.stdout, job
    assert image in job.stdout
    assert "Now: no Epilog is recorded" in job.stdout


def test_two_steps_on_all_nodes_make_one_copy_on_each(spank: Site) -> None:
    image, nodes = spank.image("wide", mib=4), spank.cluster.nodes
    step = f"srun --container-image={image} {SHOW}"
    job = spank.sbatch(f"{step}\n{step}", node=",".join(nodes))
    seen = spank.seen(job.job)
    assert tuple(one.node for one in seen[::2]) == nodes
    assert wrong(spank, image, seen) == []
    for node in nodes:
        assert [one.result for one in served(spank, job.job, node)] == ["copied", "hit"]


def test_two_concurrent_steps_each_see_their_own_image(spank: Site) -> None:
    one, two = spank.image("one"), spank.image("two", seed=2)
    wait = "touch $0; until test -e $1; do sleep 0.05; done; cat /etc/os-release"
    step = "srun --overlap -n1 --container-image={} sh -c '{}' /shared/alice/{} /shared/alice/{} &"
    steps = [step.format(one, wait, "a", "b"), step.format(two, wait, "b", "a"), "wait"]
    job = spank.sbatch("rm -f a b\n" + "\n".join(steps), "--ntasks=2")
    assert {"ID=one", "ID=two"} <= set(job.stdout.splitlines()), job
    seen = {each.path: each for each in spank.seen(job.job)}
    assert wrong(spank, one, [seen[one]]) == []
    assert wrong(spank, two, [seen[two]]) == []
    assert seen[one].sha256 != seen[two].sha256


def test_each_part_of_a_heterogeneous_job_has_its_image(spank: Site) -> None:
    """Each has a job ID of its own: the Epilog of each must know what its steps took."""
    left, right = spank.image("left"), spank.image("right", seed=2)
    steps = [f"srun --het-group=0 --container-image={left} {SHOW}"]
    steps += [f"srun --het-group=1 --container-image={right} {SHOW}"]
    parts = ["--nodelist=n1", "--output=parts", ":", "--nodelist=n2"]
    spank.cluster.submit("#!/bin/sh\n" + "\n".join(steps), *parts)
    spank.cluster.wait_idle()
    said = spank.cluster.read("/shared/alice/parts").splitlines()
    assert [line for line in said if "ID=" in line] == ["ID=left", "ID=right"]
    for node, image in (("n1", left), ("n2", right)):
        (seen,) = seen_at(spank, image)
        assert seen.node == node
        assert wrong(spank, image, [seen]) == []


def test_later_step_runs_no_helper_until_the_image_changes(spank: Site) -> None:
    image = spank.image("further", mib=2)
    step = f"srun --container-image={image} {SHOW}"
    replace = f"cp {image} {image}.new; mv {image}.new {image}"
    job = spank.sbatch(f"{step}\n{step}\n{replace}\n{step}")
    first, second, third = served(spank, job.job, "n1")
    assert first.wait > second.wait == 0.0, "only a helper notes how long it took"
    assert (second.result, second.key, second.redirect) == ("hit", first.key, "spank")
    assert third.wait > 0.0
    assert third.key != first.key
    assert not any(map(spank.shows_source, spank.seen(job.job)))
    assert "Step 1" in spank.command("explain", str(job.job))


def test_later_step_without_a_helper_detects_an_image_changed_on_the_file_server(
    site: Site,
) -> None:
    """Where it has promised this node to tell of changes, no open asks (tests/faults/nfslike.c)."""
    site.configure(redirect="spank")
    cluster, folder, point = site.cluster, "/shared/.promised", "/shared/alice/promised"
    cluster.run(["install", "-d", "-o", ALICE.name, folder, point], user="root")
    for seed, name in enumerate(("image", "later")):
        images.make_image(cluster, f"{folder}/{name}.sqsh", mib=2, name=name, seed=seed)
    with_fuse("nfslike", cluster.state)
    argv = [str(INSIDE_STATE / "nfslike"), folder, point, "promised"]
    server = cluster.popen(argv, user="root", node="n1")
    try:
        wait_until(lambda: f" {point} " in cluster.mounts("n1"), 30, lambda: "nfslike to mount")
        step = f"srun --container-image={point}/image.sqsh {SHOW}"
        change = f"cat {folder}/later.sqsh > {folder}/image.sqsh"
        job = site.sbatch(f"{step}\n{step}\n{change}\n{step}")
        first, second, third = served(site, job.job, "n1")
    finally:
        cluster.run(["umount", "--lazy", point], user="root", node="n1")
        server.wait(60)
    assert first.wait > second.wait == 0.0, "only a helper notes how long it took"
    assert third.wait > 0.0
    later = images.sha256(cluster.host_path(f"{folder}/later.sqsh"))
    assert [one.sha256 == later for one in site.seen(job.job)] == [False, False, True]


def test_steps_read_through_during_a_slow_copy(spank: Site) -> None:
    """One whose Prolog knew the image, and two of which the job's script knew alone."""
    image, inner = spank.image("known", mib=8), spank.image("inner", mib=8, seed=1)
    spank.configure(redirect="spank", cold="auto", bandwidth="64KiB", chunk_size="1MiB")
    step = f"srun --container-image={inner} {SHOW}"
    known, script = spank.srun(image), spank.sbatch(f"{step}\n{step}", node="n2")
    assert [spank.outcome(known.job).redirect, known.code] == ["spank", 0]
    assert [one.result for one in served(spank, known.job, "n1")] == ["through"]
    first, further = served(spank, script.job, "n2")
    # What a job waits for is copied without the limit: the second step may find all of it here.
    assert first.result == "through"
    assert further.result in ("through", "hit")
    assert first.wait > further.wait == 0.0, "only a helper notes how long it took"
    for one in (*spank.seen(known.job), *spank.seen(script.job)):
        assert (one.sha256, one.mount_point) == (spank.sha256(one.path), one.path)
        assert not spank.shows_source(one)
    assert script.stdout.splitlines() == ['NAME="inner"', "ID=inner"] * 2
    spank.end_stagers()
    spank.await_keepers()
    spank.reset()  # parts stay, for a resumed copy
