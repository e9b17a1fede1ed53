"""A squashfs file that a comment names for a mount point shows there in the job's steps."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator

import pytest
import slow
from cluster import Cluster
from fleet import Fleet
from host import ClusterError, wait_until
from jobs import Ran, Site
from spec import ClusterSpec
from steps import SHOW, accompanied, served

from forestage.events import RequestOutcome
from forestage.features.data.squashfs_server import PROCESS_NAME, PROGRAMS

POINT, ROOT = "/shared/alice/point", "/forestage-points"
LOOK = f"cat {POINT}/etc/os-release"
BINDS = 'unshare -rm --propagation slave sh -c "mkdir -p {box}; mount --{how} {of} {box} && {look}"'


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    spec = accompanied(2)
    return dataclasses.replace(spec, node_dirs=(*spec.node_dirs, ROOT))


@pytest.fixture(scope="module")
def servers_end(site_cluster: Cluster) -> Iterator[None]:
    """Nothing of what was mounted outlives the jobs; the servers of all tests end together."""
    yield
    site = Site(site_cluster)
    wait_until(lambda: not servers(site), 60, lambda: f"servers live on: {servers(site)}")
    for node in site.cluster.nodes:
        assert list(site.cluster.host_path("/run/forestage/served", node).glob("*")) == []


@pytest.fixture
def data(servers_end: None, spank: Site) -> Iterator[Site]:
    spank.cluster.run(["mkdir", "-p", POINT], user="alice")
    yield spank
    spank.cluster.wait_idle()


def servers(site: Site, *names: str) -> list[str]:
    wanted = names or (PROCESS_NAME, *PROGRAMS)
    return [pid for node in site.cluster.nodes for pid in site.named(node, *wanted)]


def comment(image: str, point: str = POINT) -> str:
    return f"--comment=stage={image}@{point}"


def step(site: Site, image: str, *argv: str, point: str = POINT) -> Ran:
    return site.srun(None, "sh", "-c", *argv, options=[comment(image, point)])


def of_step(site: Site, job: Ran, number: int = 0) -> RequestOutcome:
    found = served(site, job.job, "n1")[number]
    assert isinstance(found, RequestOutcome)
    return found


def says(name: str) -> str:
    return f'NAME="{name}"\nID={name}\n'


def test_squashfs_file_is_mounted_read_only_at_its_mount_point_in_the_step(data: Site) -> None:
    image = data.image("env", mib=2)
    ran = step(data, image, f"{LOOK}; grep {POINT} /proc/self/mountinfo; id -u")
    assert ran.stdout.startswith(says("env")), ran
    line, _ = ran.stdout.splitlines()[2:]
    assert " ro,nosuid,nodev" in line
    assert " fuse.squashfuse " in line
    outcome = of_step(data, ran)
    assert (outcome.request, outcome.redirect) == (f"{image}@{POINT}", "spank")
    assert [one.result for one in data.outcomes(ran.job)] == ["started"]


def test_squashfs_file_is_mounted_in_the_batch_script_and_in_its_steps(data: Site) -> None:
    image = data.image("batch")
    ran = data.sbatch(f"{LOOK}\nsrun {LOOK}\n", comment(image))
    assert ran.stdout == 2 * says("batch")
    assert [one.result for one in served(data, ran.job, "n1")[1:]] == ["hit"]


def test_tasks_of_a_step_share_one_squashfs_mount_on_each_node(data: Site) -> None:
    image = data.image("tasks")
    options = [comment(image), "--ntasks-per-node=3", "--overcommit"]
    look = f"echo $SLURMD_NODENAME $(stat -c %d {POINT}/etc)"
    ran = data.srun(None, "sh", "-c", look, options=options, node="n1,n2")
    shown = ran.stdout.splitlines()
    assert len(shown) == 6
    assert {line.split()[0] for line in shown} == {"n1", "n2"}
    assert len(set(shown)) == 2  # the number of a server that has ended is the next one's


def test_container_step_sees_the_mounted_squashfs_file(data: Site) -> None:
    """The stand-in for pyxis binds with all that is mounted below, as --container-mounts does."""
    image, env = data.image("container"), data.image("inside")
    ran = data.srun(image, "sh", "-c", f"{LOOK}; {SHOW}", options=[comment(env)])
    assert ran.stdout == says("inside") + says("container")


@pytest.mark.parametrize("of", [POINT, "/shared/alice", "/shared"])
def test_user_container_with_a_recursive_bind_sees_the_mounted_squashfs_file(
    data: Site, of: str
) -> None:
    image, box = data.image("bound"), "/shared/alice/box"
    look = f"cat {box}{POINT.removeprefix(of)}/etc/os-release"
    ran = step(data, image, BINDS.format(box=box, how="rbind", of=of, look=look))
    assert ran.stdout == says("bound"), ran


def test_user_container_with_a_non_recursive_bind_above_a_mount_does_not_start(
    data: Site,
) -> None:
    """So the kernel has it, for a container of the user's own. Where a step's is known to bind so,
    nothing is mounted: tests/features/data/hooks/test_mounted_squashfs.py."""
    image, box = data.image("above"), "/shared/alice/box"
    ran = step(data, image, BINDS.format(box=box, how="bind", of="/shared/alice", look="true"))
    assert ran.code != 0
    bind = BINDS.format(box=box, how="bind", of=POINT, look=f"cat {box}/etc/os-release")
    assert step(data, image, bind).stdout == says("above")


def test_step_after_a_killed_squashfs_server_gets_a_new_server(data: Site) -> None:
    image = data.image("killed", mib=2)
    gone, on = data.source("/shared/alice/gone"), data.source("/shared/alice/on")
    for flag in (gone, on):
        flag.unlink(missing_ok=True)
    wait = f"{LOOK}; touch /shared/alice/on; until test -e /shared/alice/gone; do sleep 0.05; done"
    script = f"srun sh -c '{wait}; ls {POINT}' 2>&1\nsrun {LOOK}\n"
    node = ["--nodelist=n1", "--output=killed"]
    job = data.cluster.submit(f"#!/bin/sh\n{script}", *node, comment(image), user="alice")
    wait_until(on.exists, 60, lambda: "the step does not start")
    # Those of this node: another one's pids are other processes here, slurmd perhaps.
    for pid in data.named("n1", *PROGRAMS):
        with contextlib.suppress(ClusterError):  # it ended meanwhile
            data.root(["kill", f"-{signal.SIGKILL.value}", pid], "n1")
    wait_until(lambda: not data.named("n1", *PROGRAMS), 60, lambda: "the servers live")
    gone.touch()
    data.wait_over(job)
    said = data.cluster.read("/shared/alice/killed")
    assert said.startswith(says("killed"))
    assert said.endswith(says("killed"))
    assert "Transport endpoint is not connected" in said


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("/etc", "nothing may be mounted over /etc"),
        ("/shared/bob", "this user cannot write to the directory"),
        ("/shared/alice", "would hide /shared/alice"),
        ("/shared/alice/to-etc", "nothing may be mounted over /etc"),
        ("/shared/alice/none", "does not exist"),
        ("/tmp", "this user cannot write to the directory"),
    ],
)
def test_invalid_mount_point_is_declined_and_the_step_runs(
    data: Site, point: str, why: str
) -> None:
    link = data.source("/shared/alice/to-etc")
    if not link.is_symlink():
        link.symlink_to("/etc")
    ran = step(data, data.image("hostile"), "grep -c squashfuse /proc/self/mountinfo", point=point)
    assert ran.stdout == "0\n"
    assert why in ran.stderr, ran.stderr


def test_missing_mount_point_is_created_in_the_step_but_not_on_the_node(data: Site) -> None:
    data.configure(redirect="spank", data={"mount_roots": [ROOT]})
    image, point = data.image("made"), f"{ROOT}/deep/env"
    assert step(data, image, f"cat {point}/etc/os-release", point=point).stdout == says("made")
    assert data.root(["ls", ROOT], "n1") == ""


def test_job_in_a_partition_with_staging_off_gets_no_mount(data: Site) -> None:
    image = data.image("off")
    ran = data.srun(None, "ls", POINT, options=[comment(image), "--partition=plain"])
    assert (ran.stdout, ran.code) == ("", 0)


SET = "/shared/alice/set"
KIND = f"stat -f -c %T {SET}"


@pytest.fixture
def tree(data: Site) -> Iterator[Site]:
    """A directory of Alice's; no node keeps a device of it."""
    script = f"rm -rf {SET}; mkdir -p {SET}/a; echo one >{SET}/a/one; ln -s a/one {SET}/link"
    data.cluster.run(["sh", "-c", script], user="alice")
    yield data
    data.cluster.wait_idle()
    for node in data.cluster.nodes:
        listed = data.root(["losetup", "--list", "--noheadings", "--output", "BACK-FILE"], node)
        assert str(data.cache(node).root) not in listed
        assert data.leases(node) == []


@pytest.mark.always
def test_staged_directory_is_the_nodes_copy_in_all_tasks_of_the_step(tree: Site) -> None:
    comment = [f"--comment=stage={SET}/ stage-wait=60s", "--ntasks-per-node=2", "--overcommit"]
    look = f"{KIND}; cat {SET}/link; stat -c %U {SET}/a; touch {SET}/x 2>&1 | grep -c Read-only"
    ran = tree.srun(None, "sh", "-c", look, options=comment, node="n1,n2")
    assert sorted(ran.stdout.split()) == sorted(4 * ["erofs", "one", "alice", "1"]), ran
    found = [one for one in served(tree, ran.job, "n1") if isinstance(one, RequestOutcome)]
    assert (SET, "hit") in [(one.image, one.result) for one in found]


def test_staged_directory_is_visible_in_a_container_at_its_mount_target(tree: Site) -> None:
    comment = [f"--comment=stage={SET}/ stage-wait=60s", f"--container-mounts={SET}:/mnt:ro"]
    look = f"stat -f -c %T /mnt; cat /mnt/link; {SHOW}"
    ran = tree.srun(tree.image("in"), "sh", "-c", look, options=comment)
    assert ran.stdout.splitlines()[:3] == ["erofs", "one", 'NAME="in"'], ran


FILES = 1000  # of which another node looks at 64


@pytest.mark.parametrize("peers", [True, False])
def test_one_node_of_a_job_scans_a_directory_for_all_nodes_only_if_peers_are_on(
    site: Site, peers: bool
) -> None:
    """Counted by what each node asks of the file server. Without peers each looks at all."""
    fleet, nodes, tree = Fleet(site.cluster), site.cluster.nodes, f"{slow.POINT}/set"
    make = f"mkdir -p {slow.FOLDER}/set/a && cd {slow.FOLDER}/set/a && seq {FILES} | split -l1 -a3"
    comment = [f"--comment=stage={tree}/ stage-wait=60s"]
    look = f"stat -f -c %T {tree}; cat {tree}/a/* | wc -l"
    with slow.mounted(site.cluster) as far:
        site.cluster.run(["sh", "-c", make], user="alice")
        far.behaves(ago=3600)  # what has just changed each node looks at itself
        fleet.configure(redirect="spank", peers={"enabled": peers, "listen": "{node}"})
        fleet.serve(nodes if peers else [])
        asked = []
        for results in (["started", "hit"], ["started", "hit"]):
            before = {node: far.calls(node) for node in nodes}
            ran = site.srun(None, "sh", "-c", look, options=comment, node=",".join(nodes))
            asked.append({node: far.calls(node) - before[node] for node in nodes})
            assert sorted(ran.stdout.split()) == sorted(["erofs", str(FILES)] * len(nodes)), ran
            for node in nodes:
                seen = [site.outcomes(ran.job, node, hook) for hook in ("prolog", "step")]
                assert [one.result for found in seen for one in found] == results
        site.await_stagers()
        fleet.end_services()
    first, other = nodes
    for calls in asked:
        assert calls[first]["readdir"] > 0
        assert (calls[other]["readdir"] == 0) is peers, asked
    # A hit: one look at all files as the job starts, and one in the step.
    found = {node: sum(asked[-1][node].values()) for node in nodes}
    assert (3 * found[other] < found[first]) is peers, asked
    assert found[first] > 2 * FILES


def test_step_reads_the_shared_path_after_its_staged_directory_was_changed(tree: Site) -> None:
    fill = f"echo two >{SET}/a/two"
    gone, on = tree.source("/shared/alice/gone"), tree.source("/shared/alice/on")
    for flag in (gone, on):
        flag.unlink(missing_ok=True)
    wait = "touch /shared/alice/on; until test -e /shared/alice/gone; do sleep 0.05; done"
    script = f"#!/bin/sh\nsrun {KIND}\n{wait}\nsrun {KIND}\nsrun cat {SET}/a/two\n"
    options = ["--nodelist=n1", "--output=written", f"--comment=stage={SET}/ stage-wait=60s"]
    job = tree.cluster.submit(script, *options, user="alice")
    wait_until(on.exists, 60, lambda: "the first step does not end")
    tree.cluster.run(["sh", "-c", fill], user="alice")  # as another node would
    gone.touch()
    tree.wait_over(job)
    lines = tree.cluster.read("/shared/alice/written").splitlines()
    # Slurm says so where a step begins before all of the last one has gone.
    first, said, second, word = (line for line in lines if not line.startswith("srun: "))
    assert (first, word) == ("erofs", "two")
    assert second != "erofs"
    assert "has changed since the job began" in said


def test_directory_that_cannot_be_staged_is_read_from_the_shared_path_with_a_message(
    tree: Site,
) -> None:
    tree.cluster.run(["mkfifo", f"{SET}/fifo"], user="alice")
    options = [f"--comment=stage={SET}/ stage-wait=60s"]
    ran = tree.srun(None, "cat", f"{SET}/a/one", options=options)
    assert (ran.stdout, ran.code) == ("one\n", 0)
    assert "fifo is neither a file, a directory nor a link" in ran.stderr
