"""Warming on a real Slurm: who asks learns what became of each node, and no job stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest
from host import wait_until
from jobs import CLI, Site, hooked
from spec import ClusterSpec

pytestmark = pytest.mark.ci  # without Slurm: features/prepare/processes/test_warm.py


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=3)


def warm(site: Site, *words: str, user: str = "root") -> tuple[int, dict[str, Any]]:
    """Its exit status, and by node what it says; from the login, as people do it."""
    ran = site.cluster.run([CLI, "warm", "--json", *words], user=user, check=False)
    assert ran.stdout, ran.stderr
    return ran.returncode, {one["node"]: one for one in json.loads(ran.stdout)["nodes"]}


def results(printed: dict[str, Any]) -> dict[str, str]:
    """By node; of several images all, with a space between them."""
    return {
        node: " ".join(image["result"] for image in one["images"]) or one["problem"]
        for node, one in printed.items()
    }


@pytest.mark.parametrize("user", ["root", "alice"])
def test_warm_twice_copies_then_hits(site: Site, user: str) -> None:
    image = site.image("with a space, a comma; and 100%")
    nodes = ("n1", "n2", "n3")
    assert site.cached_paths("n1") == []
    for result in ("copied", "hit"):
        code, printed = warm(site, image, "--nodes", "n[1-3]", user=user)
        assert (code, results(printed)) == (0, dict.fromkeys(nodes, result)), printed
        for node in nodes:
            assert site.cached_paths(node) == [image]
            (outcome,) = site.outcomes(printed[node]["job"], node)
            assert outcome.result == result


def test_warm_by_a_user_waits_for_a_slow_copy(site: Site) -> None:
    site.configure(redirect="spank", bandwidth="8M", chunk_size="1M")
    code, printed = warm(site, site.image("slow", mib=12), "--nodes", "n1", user="alice")
    assert (code, results(printed)) == (0, {"n1": "copied"}), printed
    assert site.results(printed["n1"]["job"]) == ["started"], "the Prolog did not wait"


def test_warm_fails_only_for_the_drained_node(site: Site) -> None:
    image = site.image("a")
    drain = ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test"]
    site.root(drain, "n1")
    # On a busy machine n1, too, is not given at once.
    code, printed = warm(site, image, "--nodes", "n[1-2]", "--busy", "10s")
    site.root(["scontrol", "update", "NodeName=n2", "State=RESUME"], "n1")
    assert (code, results(printed)["n1"]) == (1, "copied")
    assert printed["n2"]["images"] == []
    assert "allocate" in printed["n2"]["problem"]


def test_warm_prints_the_reason_of_a_declined_image(site: Site) -> None:
    code, printed = warm(site, "/etc/passwd", "--nodes", "n1")
    assert (code, results(printed)) == (1, {"n1": "declined"}), printed
    assert printed["n1"]["images"][0]["reason"] == "outside-sources"


def test_warm_by_root_waits_for_a_slow_copy(site: Site) -> None:
    """With `redirect: spank` this is so for every copy."""
    site.configure(redirect="spank", bandwidth="8M", chunk_size="1M")
    code, printed = warm(site, site.image("slow", mib=12), "--nodes", "n1", user="root")
    assert (code, results(printed)) == (0, {"n1": "copied"}), printed
    assert site.results(printed["n1"]["job"]) == ["started"], "the Prolog did not wait"


def interrupted(site: Site, *words: str, user: str, state: str) -> None:
    """^C as soon as its jobs on n1 and n2 are in that state; none may be left of them."""
    asking = site.cluster.popen([CLI, "warm", *words, "--nodes", "n[1-2]"], user=user)
    squeue = ["squeue", "--noheader", "--format=%T %j"]

    def jobs() -> list[str]:
        return site.cluster.run(squeue, user="root").stdout.splitlines()

    def asked() -> bool:
        names = [line for line in jobs() if line.startswith(f"{state} forestage-warm-")]
        return len(names) == 2

    wait_until(asked, 60, lambda: f"{jobs()} {asking.poll()}")
    site.cluster.signal(asking, signal.SIGINT)
    try:
        out, err = asking.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(asking.pid, signal.SIGKILL)
        raise
    assert (asking.returncode, out) == (130, ""), err
    wait_until(lambda: jobs() == [], 60, lambda: str(jobs()))


def test_interrupted_warm_leaves_no_pending_job(site: Site) -> None:
    image = site.image("a")
    site.root(["scontrol", "update", "NodeName=n[1-2]", "State=DRAIN", "Reason=test"], "n1")
    interrupted(site, image, user="alice", state="PENDING")
    site.root(["scontrol", "update", "NodeName=n[1-2]", "State=RESUME"], "n1")


@pytest.mark.long
def test_interrupted_warm_leaves_no_running_job(site: Site) -> None:
    """The copies go on, as those of any job that is cancelled."""
    site.configure(redirect="spank", bandwidth="1M", chunk_size="1M")
    interrupted(site, site.image("slow", mib=15), user="root", state="RUNNING")
    parts = [site.cache(node).parts for node in ("n1", "n2")]
    wait_until(lambda: not any(list(one.iterdir()) for one in parts), 90, lambda: str(parts))
