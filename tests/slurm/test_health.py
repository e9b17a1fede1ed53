"""The health check, as slurmd runs it, and as NHC does: a note of the node in Slurm, no drain."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from collections.abc import Iterator

import pytest
from host import wait_until
from jobs import CACHE, Site, hooked
from spec import REPO, ClusterSpec

INSTALLED = "/usr/lib/forestage/bin/forestage-health"
PROGRAM = "/etc/slurm/forestage-health"
BY_SLURMD = "/etc/slurm/health"
ALONE = "flock /run/health.lock"
KNOWN = "/run/forestage/health"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    spec = hooked(HealthCheckProgram=BY_SLURMD, HealthCheckInterval="1", HealthCheckNodeState="ANY")
    # So that a test can keep slurmd's runs away from what it arranges.
    files = {
        PROGRAM: (REPO / "packaging/health").read_text(),
        # One at a time: on a busy machine one takes longer than until the next.
        BY_SLURMD: f"#!/bin/sh\nexec {ALONE.replace('flock', 'flock -n -E 0')} {PROGRAM}\n",
    }
    return dataclasses.replace(spec, files={**spec.files, **files})


class Health:
    """The node's notes in Slurm, and its cache, which can be made unusable."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def node(self) -> str:
        return self.root("scontrol", "show", "node", "n1")

    def notes(self) -> dict[str, str]:
        """Extra and Comment, as far as there are any."""
        fields = (line.strip().split("=", 1) for line in self.node().splitlines() if "=" in line)
        return {name: value for name, value in fields if name in ("Extra", "Comment")}

    def until(self, **notes: str) -> None:
        """Waits until the notes begin so, and there are no others."""

        def there() -> bool:
            found = self.notes()
            return found.keys() == notes.keys() and all(
                found[name].startswith(text) for name, text in notes.items()
            )

        wait_until(there, 200, self.node)

    def set(self, then: str = "", **notes: str) -> None:
        """Writes notes, and does something, in one moment for slurmd's runs."""
        words = shlex.join(f"{name}={text}" for name, text in notes.items())
        self.alone(f"scontrol update NodeName=n1 {words}; {then}")

    def alone(self, script: str) -> str:
        """A script of root's; no run of slurmd's is at work meanwhile."""
        return self.root(*ALONE.split(), "sh", "-c", script)

    def break_cache(self) -> None:
        self.root("chmod", "0777", CACHE)

    def mend_cache(self) -> None:
        self.root("chmod", "0700", CACHE)

    def root(self, *argv: str) -> str:
        return self.site.root(argv, "n1")

    def nhc(self) -> tuple[int, str]:
        """How the check of NHC ends, in NHC's way of running one, and what it says."""
        check = (REPO / "packaging/nhc/forestage.nhc").read_text().replace(INSTALLED, PROGRAM)
        nhc = f'function die() {{ local code=$1; shift; echo "$*"; }}\n{check}\ncheck_forestage\n'
        ran = self.site.cluster.run(["bash", "-c", nhc], user="root", node="n1", check=False)
        return ran.returncode, ran.stdout


@pytest.fixture
def health(site: Site) -> Iterator[Health]:
    site.srun(site.image("a"))
    made = Health(site)
    yield made
    made.mend_cache()
    made.set(f"rm -f {KNOWN}", Extra="", Comment="")


BROKEN = "forestage: unusable: "


def test_unusable_cache_is_noted_in_slurms_node_record_until_it_is_usable(health: Health) -> None:
    health.break_cache()
    health.until(Extra=BROKEN)
    assert "State=IDLE" in health.node()
    health.mend_cache()
    health.until()


def test_health_check_does_not_create_a_directory_that_exists(health: Health) -> None:
    """mkdir(2) would wait for the lock of /run, which a user can hold; slurmd waits for this."""
    path = "/run/fake"
    script = f"""
        mkdir -p {path} && printf '#!/bin/sh\\ntouch {path}/called' >{path}/mkdir
        chmod +x {path}/mkdir && rm -f {KNOWN}
        PATH={path}:$PATH {PROGRAM} && ls {path} {KNOWN}
    """
    assert health.alone(script).split() == [KNOWN, f"{path}:", "mkdir"]


def test_health_note_from_before_a_boot_is_cleared_once_the_node_is_healthy(health: Health) -> None:
    health.set(f"rm -f {KNOWN}", Extra=f"{BROKEN}of before the boot")
    health.until()


def test_health_check_keeps_the_extra_and_comment_that_the_site_wrote(health: Health) -> None:
    health.set(f"rm -f {KNOWN}", Extra='{"rack": 7}', Comment="RMA 4711")
    health.break_cache()
    wait_until(lambda: BROKEN in health.root("sh", "-c", f"cat {KNOWN} || :"), 200, health.node)
    health.mend_cache()
    wait_until(lambda: not health.root("cat", KNOWN).strip(), 200, health.node)
    assert health.notes() == {"Extra": '{"rack": 7}', "Comment": "RMA 4711"}


def test_health_check_updates_slurmctld_only_when_the_note_changes(health: Health) -> None:
    health.break_cache()
    health.until(Extra=BROKEN)
    marked = f"{BROKEN}and a mark of the test's"
    health.set(PROGRAM, Extra=marked)
    assert health.notes()["Extra"] == marked


def test_health_check_clear_removes_the_note_and_print_only_prints_the_note(health: Health) -> None:
    health.break_cache()
    health.until(Extra=BROKEN)
    assert health.root(PROGRAM, "--print").startswith(BROKEN)
    # slurmd's next run writes it again: this one is for a package that goes.
    after = health.alone(f"{PROGRAM} --clear; scontrol show node n1")
    assert "Extra=" not in after


def test_nhc_check_fails_on_an_unusable_cache_but_not_if_staging_is_off(health: Health) -> None:
    assert health.nhc() == (0, "")
    health.break_cache()
    code, said = health.nhc()
    assert code == 1
    assert said.startswith(f"check_forestage:  {BROKEN}")
    health.root("sh", "-c", "echo INC-42 >/run/forestage/disabled")
    try:
        health.mend_cache()
        assert health.nhc()[0] == 0
    finally:
        health.root("rm", "/run/forestage/disabled")


@pytest.mark.parametrize("script", ["health", "nhc/forestage.nhc"])
def test_health_check_script_has_valid_syntax_for_its_shell(script: str) -> None:
    shell = "bash" if script.endswith(".nhc") else "sh"
    subprocess.run([shell, "-n", REPO / "packaging" / script], check=True)
