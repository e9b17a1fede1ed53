"""The lines of `forestage enable` for nodes with a local disk, in a real slurm.conf."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster
from host import wait_until
from spec import ClusterSpec, slurm_conf

from forestage.check import enable_plan
from forestage.check.enable_plan import CacheDisk
from forestage.check.slurm_site import ParsedSlurmConf, PluginStack, SlurmSite

CONF = "/etc/slurm/slurm.conf"
DISK = CacheDisk("/mnt/nvme", mib=64_000, for_jobs=30)  # what the node says, Slurm believes


def spec() -> ClusterSpec:
    """n2 has the disk; n1, where Slurm would rather start a job, has none."""
    site = SlurmSite(ParsedSlurmConf(CONF, ()), (), PluginStack("", ()), False)
    plain = ClusterSpec(nodes=2, nvme_mib=64, prolog="/bin/true", epilog="/bin/true")
    settings: dict[str, str | None] = {}
    files: dict[str, str] = {}
    of_node = ""
    for line in enable_plan.list_disk_lines(site, DISK):
        name, _, value = line.text.partition("=")
        if line.file != CONF:
            files[line.file] = line.text.replace("NODES", "n2") + "\n"
        elif line.place == "at the end":
            settings[name] = value
        else:
            of_node = line.text
    lines = slurm_conf(plain).splitlines()
    (nodes,) = [line.removeprefix("NodeName=") for line in lines if line.startswith("NodeName=")]
    named, ports = nodes.replace("n[1-2]", "{0}"), "Port=[17001-17002]"
    assert ports in named
    first, second = (named.format(f"n{n}").replace(ports, f"Port={17000 + n}") for n in (1, 2))
    settings["NodeName"] = f"{first}\nNodeName={second} {of_node}"
    return ClusterSpec(
        nodes=2,
        nvme_mib=64,
        prolog="/bin/true",
        epilog="/bin/true",
        slurm_conf=settings,
        files=files,
    )


@pytest.fixture(scope="module")
def cluster(machine: None) -> Iterator[Cluster]:
    with Cluster.up(spec()) as made:
        yield made


@pytest.mark.parametrize(
    "asked", ["--constraint=nvme", "--tmp=20G", "--constraint=nvme --tmp=20G", "--gres=nvme:20"]
)
def test_job_that_requests_the_nvme_disk_runs_on_the_node_with_the_disk(
    cluster: Cluster, asked: str
) -> None:
    ran = [
        cluster.run(["srun", *asked.split(), "printenv", "SLURMD_NODENAME"]).stdout
        for _ in range(2)
    ]
    assert ran == ["n2\n", "n2\n"]


def test_job_that_requests_more_nvme_than_a_node_has_is_refused(cluster: Cluster) -> None:
    for asked in ("--tmp=65G", "--gres=nvme:31"):
        ran = cluster.run(["srun", asked, "true"], check=False)
        assert ran.returncode != 0, asked


def test_gres_limits_the_nvme_of_all_jobs_together_but_tmp_does_not(cluster: Cluster) -> None:
    def job(*asked: str) -> str:
        return str(cluster.submit("#!/bin/sh\nsleep 600\n", "--nodelist=n2", *asked))

    def states(jobs: list[str]) -> list[str]:
        found = cluster.run(["squeue", "-h", "-S", "i", "-o", "%T %r", "-j", ",".join(jobs)])
        return found.stdout.splitlines()

    jobs = [job("--tmp=40G"), job("--tmp=40G"), job("--gres=nvme:20"), job("--gres=nvme:20")]
    wanted = ["RUNNING None", "RUNNING None", "RUNNING None", "PENDING Resources"]
    wait_until(lambda: states(jobs) == wanted, 60, lambda: str(states(jobs)))
    cluster.run(["scancel", *jobs], user="root")
    cluster.wait_idle()
