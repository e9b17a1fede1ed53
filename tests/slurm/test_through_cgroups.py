"""Keepers and servers of images on a node whose Slurm tracks and limits jobs by real cgroups (v1).

Slurm's cgroups are named by node, and this machine's are shared by all clusters: only one of them
may have some.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import slow
from cluster import Cluster
from host import wait_until
from jobs import Site
from registry import STORE, with_importer
from spec import ClusterSpec
from steps import accompanied
from test_data import POINT, comment
from test_through import HOLD, KEEPER, MIB, SERVER, STAGER, looks, read_through, waits

from forestage.features.data.job_disk import PROCESS_NAME as HOLDER
from forestage.features.data.squashfs_server import PROGRAMS
from forestage.features.registry.worker import MODULE as WORKER

CGROUPS = Path("/sys/fs/cgroup")
CONF = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nConstrainCores=yes\n"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    if not (CGROUPS / "memory/cgroup.procs").exists():
        pytest.skip("needs the memory controller of cgroup v1")
    spec = accompanied(
        1,
        ProctrackType="proctrack/cgroup",
        TaskPlugin="task/cgroup",
        JobAcctGatherType="jobacct_gather/cgroup",
        SelectTypeParameters="CR_CPU_Memory",
        DefMemPerNode="256",
        NodeName="n1 NodeHostname=login NodeAddr=n1 Port=17001 CPUs=2 RealMemory=1024",
        KillWait="600",
    )
    files = {**spec.files, "/etc/slurm/cgroup.conf": CONF}
    node_dirs = (*spec.node_dirs, "/forestage")
    return with_importer(
        dataclasses.replace(
            spec, files=files, node_dirs=node_dirs, plugstack=("required {state}/pyxis.so",)
        )
    )


@pytest.fixture(scope="module")
def site_cluster(machine: None, cluster_spec: ClusterSpec) -> Iterator[Cluster]:
    try:
        with Cluster.up(cluster_spec) as cluster:
            yield cluster
    finally:
        for top in CGROUPS.glob("*/slurm_n1"):
            for folder in sorted(top.glob("**/"), reverse=True):
                folder.rmdir()


def cgroups(site: Site, pid: str) -> list[str]:
    """The paths of a process that are a job's, or slurmd's own."""
    text = site.cluster.read(f"/proc/{pid}/cgroup", "n1")
    return [line for line in text.splitlines() if "slurm" in line]


def safest(site: Site) -> str:
    """What root gets who asks for the least oom_score_adj: not all machines' root may have it."""
    adj = "/proc/self/oom_score_adj"
    return site.root(["sh", "-c", f"echo -1000 >{adj} 2>&- || true; cat {adj}"], "n1")


def test_step_reads_through_after_the_step_that_started_the_keeper_has_ended(site: Site) -> None:
    flag = site.source("/shared/alice/ended")
    flag.unlink(missing_ok=True)
    with slow.mounted(site.cluster) as far:
        image, digest = far.image("two", mib=MIB), far.sha256("two")
        site.configure(redirect="spank", cold="through", chunk_size="1MiB")
        far.behaves(hold=HOLD)
        first = f"srun -n1 --overlap --mem=64 --container-image={image} true; touch ended"
        second = f"srun -n1 --overlap --mem=128 --container-image={image} {looks(image)}"
        script = f"#!/bin/sh\n({second}) & ({first}) & wait\n"
        job = site.cluster.submit(script, "--nodelist=n1", "--output=two", "--ntasks=2")
        wait_until(lambda: flag.exists() and waits(site), 60, lambda: site.cluster.logs())
        (task,) = site.named("n1", "sha256sum")
        assert cgroups(site, task), "Slurm uses no cgroups"
        for name in (KEEPER, SERVER, STAGER):
            (pid,) = site.named("n1", name)
            assert cgroups(site, pid) == []
            safe = site.cluster.read(f"/proc/{pid}/oom_score_adj", "n1")
            assert safe == ("0\n" if name == STAGER else safest(site))
        far.behaves()
        site.wait_over(job)
        assert read_through(site.cluster.read("/shared/alice/two")) == [digest]
        site.await_keepers()


def test_server_of_a_mounted_file_is_in_the_steps_cgroups_and_ends_with_the_step(
    spank: Site,
) -> None:
    image = spank.image("mounted")
    spank.cluster.run(["mkdir", "-p", POINT], user="alice")
    said = comment(image).removeprefix("--comment=")
    with spank.holding(None, comment=said) as held:
        (pid,) = spank.named("n1", *PROGRAMS)
        step = f"/job_{held.job}/step_0"

        def is_there() -> bool:  # one hierarchy after the other
            found = cgroups(spank, pid)
            return len(found) > 1 and all(step in one for one in found)

        wait_until(is_there, 60, lambda: f"only {cgroups(spank, pid)}")
    wait_until(lambda: not spank.named("n1", *PROGRAMS), 60, lambda: "it lives on")


SILENT = """
import socket
one = socket.create_server(("127.0.0.1", 0))
print(one.getsockname()[1], flush=True)
input()
"""


def test_cancelled_import_leaves_no_cgroup_of_its_job(site: Site) -> None:
    """Slurm removes the step's once, when the worker is still in them: it may clean up."""
    site.cluster.run(["mkdir", "-p", "-m", "1777", STORE], user="root")
    site.configure(redirect="spank", registry={"store": STORE})
    registry = site.cluster.popen(["python3", "-c", SILENT], stdin=subprocess.PIPE)
    assert registry.stdout is not None
    image = f"docker://127.0.0.1:{int(registry.stdout.readline())}/x"
    job = site.cluster.submit(f"#!/bin/sh\nsrun --container-image={image} true\n")

    def is_there() -> bool:
        look = ["pgrep", "-f", WORKER]
        found = site.cluster.run(look, user="root", node="n1", check=False).stdout.split()
        return any(f"/job_{job}/step_0" in line for pid in found for line in cgroups(site, pid))

    wait_until(is_there, 60, lambda: "no worker in the step's cgroups")
    site.cluster.run(["scancel", str(job)], user="root")
    left = [*CGROUPS.glob(f"*/slurm_n1/uid_*/job_{job}")]
    assert left
    wait_until(lambda: not any(one.exists() for one in left), 90, lambda: f"{left} stay")
    registry.communicate("\n")


def test_job_directory_in_memory_counts_as_the_jobs_memory_and_ends_with_the_job(
    spank: Site,
) -> None:
    spank.cluster.run(["sh", "-c", "head -c 24M /dev/zero >/shared/alice/large"], user="alice")
    with spank.holding(None, comment="stage-dir=64M,ram stage=/shared/alice/large@job") as held:
        (pid,) = spank.named("n1", HOLDER)
        assert cgroups(spank, pid) == []
        assert spank.cluster.read(f"/proc/{pid}/oom_score_adj", "n1") == safest(spank)
        (folder,) = CGROUPS.glob(f"memory/slurm_n1/uid_*/job_{held.job}")
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # Pages of a tmpfs are charged to who writes them: forestage's own process, in the step.
        assert int(stat["total_shmem"]) >= 24 << 20
        assert int((folder / "memory.limit_in_bytes").read_text()) == 256 << 20
    wait_until(lambda: not spank.named("n1", HOLDER), 60, lambda: "its holder lives on")
    assert not list((spank.cache("n1").root / "jobs").iterdir())


@pytest.mark.parametrize(("size", "has_it"), [("256M", True), ("257M", False)])
def test_job_directory_in_memory_is_no_larger_than_the_jobs_memory(
    spank: Site, size: str, has_it: bool
) -> None:
    script = 'echo "[$FORESTAGE_DIR]"'
    ran = spank.srun(None, "sh", "-c", script, comment=f"stage-dir={size},ram")
    assert ran.stdout == ("[/forestage/job]\n" if has_it else "[]\n"), ran
    assert ("this job's memory is 256 MiB" in ran.stderr) is not has_it
