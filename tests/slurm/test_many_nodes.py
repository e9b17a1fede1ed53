"""One command on many nodes where root has no ssh: ClusterShell's own clush, and srun for each.

tests/processes/commands/test_clush.py has the way by ssh.
"""

from __future__ import annotations

import subprocess

import pytest
from jobs import Site, hooked
from spec import REPO, VENV, ClusterSpec

from forestage.commands.command_context import ExitStatus

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=2)


def clush(site: Site, srun: str = "srun") -> subprocess.CompletedProcess[str]:
    """Runs the line of docs/operations.md as root on the login, which has no cache."""
    page = (REPO / "docs/operations.md").read_text().splitlines()
    (line,) = [one.strip() for one in page if one.startswith("    clush -R exec")]
    line = line.replace("n[1-64]", "n[1-2]").replace("srun", srun)
    argv = ["sh", "-c", f"PATH={VENV}/bin:$PATH; export PATH; {line} </dev/null"]
    return site.cluster.run(argv, user="root", check=False)


def jobs_left(site: Site) -> str:
    return site.cluster.run(["squeue", "--noheader", "--format=%i"], user="root").stdout


def test_clush_status_prints_each_nodes_line_and_exits_with_the_worst_status(site: Site) -> None:
    for node in site.cluster.nodes:
        site.srun(site.image("a"), node=node)
    done = clush(site)
    assert done.returncode == ExitStatus.OK, done
    assert done.stdout.count("\nforestage state=ok ") == 1, "equal lines are one"
    site.root(["chmod", "0777", "/mnt/nvme/forestage"], "n2")
    done = clush(site)
    site.root(["chmod", "0711", "/mnt/nvme/forestage"], "n2")
    assert done.returncode == ExitStatus.CACHE, done
    assert "\nn1\n---------------\nforestage state=ok " in done.stdout
    assert "\nn2\n---------------\nforestage state=unusable " in done.stdout
    site.cluster.wait_idle()


def test_clush_by_srun_names_a_drained_node_and_leaves_no_job(site: Site) -> None:
    site.root(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test"], "n1")
    done = clush(site, "srun --immediate=5")
    site.root(["scontrol", "update", "NodeName=n2", "State=RESUME"], "n1")
    assert done.returncode == 1, done
    assert "n2: srun: error: " in done.stderr
    assert "\nn1\n---------------\nforestage state=" in done.stdout
    site.cluster.wait_idle()
    assert jobs_left(site) == ""
