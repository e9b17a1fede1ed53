"""`-w NODESET` over a real Slurm: one table of all nodes, and no job left behind."""

from __future__ import annotations

import json

import pytest
from host import wait_until
from jobs import CLI, Site, hooked
from spec import ClusterSpec

pytestmark = pytest.mark.ci  # without Slurm: processes/admin/test_fleet.py


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=3)


def ask(site: Site, *words: str) -> tuple[int, str]:
    """As root on the login, which has no cache."""
    ran = site.cluster.run([CLI, *words, "--by", "srun"], user="root", check=False)
    assert ran.stdout, ran.stderr
    return ran.returncode, ran.stdout


def test_job_and_its_image_are_seen_on_all_nodes(site: Site) -> None:
    image = site.image("a")
    jobs = {node: site.srun(image, node=node).job for node in ("n1", "n2")}

    code, listed = ask(site, "ls", "-w", "n[1-3]", image)
    rows = [line.split() for line in listed.splitlines()]
    assert (code, rows[1][0], rows[1][-1]) == (1, "n[1-2]", image)
    assert rows[2][:4] == ["n3:", "no", "entry", "has"]

    code, explained = ask(site, "explain", str(jobs["n1"]), "-w", "n1")
    assert (code, explained.splitlines()[1].split()[:3]) == (0, ["n1", "prolog", "copied"])

    code, shown = ask(site, "evict", "-w", "n[1-2]", "--dry-run", image)
    assert (code, "would be evicted" in shown) == (0, True)
    assert site.cached_paths("n1") == [image]
    code, shown = ask(site, "evict", "-w", "n[1-2]", image)
    assert (code, [site.cached_paths(node) for node in ("n1", "n2")]) == (0, [[], []])


def test_node_that_slurm_does_not_give_is_named_and_no_job_stays(site: Site) -> None:
    site.root(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test"], "n1")
    code, shown = ask(site, "status", "-w", "n[1-2]", "--within", "8s")
    site.root(["scontrol", "update", "NodeName=n2", "State=RESUME"], "n1")
    assert code == 11
    assert "n2: " in shown
    code, printed = ask(site, "status", "-w", "n1", "--json")
    (node,) = json.loads(printed)["nodes"]
    assert (node["node"], node["answer"]["cache"]) == ("n1", "/mnt/nvme/forestage")
    squeue = ["squeue", "--noheader", "--format=%j"]
    wait_until(lambda: not site.cluster.run(squeue, user="root").stdout, 60, lambda: "jobs stay")
