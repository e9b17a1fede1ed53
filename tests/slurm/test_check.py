"""`forestage check` on a real node: silent where all is well, and right about Slurm's own files."""

from __future__ import annotations

import dataclasses
import json

import pytest
from jobs import CLI, Site, hooked
from spec import INSIDE_STATE, PYXIS_REPORT, ClusterSpec

STACK = "/etc/slurm/plugstack.conf"
OURS = f"optional {INSIDE_STATE}/forestage.so\n"
PYXIS = f"required {INSIDE_STATE}/pyxis.so report={PYXIS_REPORT}\n"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    """With the companion, as docs/how-it-works.md has it."""
    # No systemd runs there. Slurm never calls it: HealthCheckInterval is 0.
    spec = hooked(nodes=1, HealthCheckProgram="/usr/lib/forestage/bin/forestage-health")
    files = {**spec.files, STACK: OURS + PYXIS}
    return dataclasses.replace(spec, files=files, companion="")


@pytest.fixture
def site(site: Site) -> Site:
    """Other tests let their jobs wait for longer than this cluster's slurm.conf allows."""
    site.configure(deadline="auto", peers={"enabled": False})
    return site


def checked(site: Site) -> tuple[int, list[str], str]:
    """How `forestage check` ends, the ids of its findings, and what it says to people."""
    words = site.cluster.run([CLI, "check"], user="root", node="n1", check=False)
    again = site.cluster.run([CLI, "check", "--json"], user="root", node="n1", check=False)
    assert again.returncode == words.returncode, words.stderr
    found = json.loads(again.stdout)["findings"]
    return words.returncode, [one["id"] for one in found], words.stdout


def test_good_node_has_no_finding_before_and_after_its_first_job(site: Site) -> None:
    assert checked(site) == (0, [], "forestage OK - nothing to change\n")
    ran = site.srun(site.image("a"))
    assert site.results(ran.job) == ["copied"]
    assert checked(site) == (0, [], "forestage OK - nothing to change\n")


def test_missing_peer_service_is_only_a_note_of_check(site: Site) -> None:
    site.configure(deadline="auto")
    code, found, said = checked(site)
    assert (code, found) == (0, ["peer-service"])
    assert said.startswith("forestage OK - 1 finding: peer-service\n")


def test_check_finds_a_setup_that_would_drain_the_node(site: Site) -> None:
    was = site.cluster.read("/etc/slurm/slurm.conf")
    try:
        site.cluster.write("/etc/slurm/slurm.conf", f"{was}Prolog=/etc/slurm/prolog.d/*\n")
        site.cluster.write(STACK, PYXIS + OURS.replace("optional", "required"))
        code, found, said = checked(site)
    finally:
        site.cluster.write("/etc/slurm/slurm.conf", was)
        site.cluster.write(STACK, OURS + PYXIS)
    assert code == 2
    assert found == ["hook-no-match", "companion-required", "plugstack-order"]
    assert "drains the node at its next job" in said


def test_check_finds_a_companion_of_another_slurm_release(site: Site) -> None:
    """Else an upgrade of Slurm would not be noticed."""
    told = site.cluster.run(["scontrol", "--version"], user="root").stdout.split()[-1]
    path = str(INSIDE_STATE / "forestage.so.release")
    assert site.cluster.read(path) == f"{told}\n"
    try:
        site.cluster.write(path, "21.08.1\n")
        code, found, said = checked(site)
    finally:
        site.cluster.write(path, f"{told}\n")
    assert (code, found) == (1, ["companion-release"])
    assert f"this is {told.rpartition('.')[0]}" in said
