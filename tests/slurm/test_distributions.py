"""The package on each distribution, booted: installed by the page's words, upgraded, removed.

Its own Slurm and Python, and systemd as the first process: services, timers, journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import wait_until
from mirror import UBUNTU as MIRROR
from newcomer import Machine, blocks
from packaged import RELEASES
from spec import REPO
from suite import UBUNTU, fresh

from forestage import events
from forestage.events import RequestOutcome

pytestmark = pytest.mark.long
SUITES = ("bookworm", "trixie", *UBUNTU)
OLD = "jammy"  # Slurm 21.08, of which the page says what to leave out, and that it needs pyxis
OLD_WORDS = ((",DeferBatch", ""), ("--comment=stage=", "--container-image="))
PYXIS = """\
apt-get install -y --no-install-recommends gcc libc6-dev make libslurm-dev
make -s -C /root/pyxis OUT=/usr/lib/pyxis.so
echo 'required /usr/lib/pyxis.so container=no' >/etc/slurm/plugstack.conf
"""
HOME, HOOKS = "/usr/lib/forestage", "/usr/libexec/forestage"
IMAGE = "/srv/images/hello.sqsh"


class Node:
    """A machine on which the page was followed."""

    def __init__(self, machine: Machine, suite: str) -> None:
        self.machine = machine
        self.type = machine.type
        option = "--container-image=" if suite == OLD else "--comment=stage="
        self.srun = f"srun {option}{IMAGE}"

    def install(self, release: str) -> str:
        return self.type(f"apt-get install -y --allow-downgrades ./forestage_{release}-1_*.deb")

    def result(self, job: int) -> str:
        """What the Prolog did for the job's image."""
        logged = events.read_events(self.machine.path("/var/log/forestage/events.jsonl"))
        (found,) = [one.outcome for one in logged if (one.job, one.hook) == (job, "prolog")]
        assert isinstance(found, RequestOutcome)
        return found.result

    def run(self) -> int:
        """A job that reads its image; its number."""
        said = self.type(
            f"{self.srun} sh -c 'unsquashfs -cat {IMAGE} greeting; echo $SLURM_JOB_ID'"
        )
        greeting, number = said.split("\n")[:2]
        assert greeting == "hello, world"
        return int(number)

    def redirected(self) -> bool:
        return IMAGE in self.type("cat /proc/self/mountinfo")

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """A job that runs, and ends well with the block."""
        wait = "touch /tmp/on; until test -e /tmp/off; do sleep 0.1; done; rm /tmp/on /tmp/off"
        job = self.machine.begin(f"{self.srun} sh -c '{wait}'")
        try:
            started = self.machine.path("/tmp/on")
            wait_until(
                lambda: started.exists() or job.poll() is not None, 120, lambda: "no job began"
            )
            assert job.poll() is None, job.communicate()
            yield
        finally:
            self.machine.path("/tmp/off").touch()
        said, problems = job.communicate(timeout=120)
        assert job.returncode == 0, (said, problems)

    def state(self) -> str:
        return self.type("sinfo --noheader --format %T").strip()


@pytest.fixture(scope="module", params=SUITES)
def node(
    machine: None,
    built: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Node]:
    suite = str(request.param)
    if suite in UBUNTU and MIRROR not in os.environ:
        pytest.skip(f"{MIRROR} names no mirror of Ubuntu")
    with Machine(fresh(suite), tmp_path_factory.mktemp(suite)) as booted:
        for release in RELEASES:
            (package,) = built.glob(f"forestage_{release}-1_*.deb")
            booted.put(package)
        (package,) = built.glob(f"forestage_{RELEASES[1]}-1_*.deb")
        later = booted.path(f"/root/{package.name}")
        later.rename(later.with_suffix(".later"))  # the page says forestage_*.deb
        page = blocks(REPO / "docs/install.md")
        for number, block in enumerate(page):
            for old, new in OLD_WORDS if suite == OLD else ():
                block = block.replace(old, new)
            said = booted.type(block)
            if suite == OLD and number == 0:
                shutil.copytree(REPO / "tests/slurm/pyxis", booted.path("/root/pyxis"))
                booted.type(PYXIS)
        assert said.count("hello, world") == 2
        later.with_suffix(".later").rename(later)
        yield Node(booted, suite)


def test_commands_of_the_install_page_lead_to_a_hit_on_each_distribution(node: Node) -> None:
    assert [node.result(job) for job in (1, 2)] == ["copied", "hit"]
    assert node.type("systemctl is-active slurmd slurmctld munge").split() == ["active"] * 3
    failed = node.type("systemctl list-units --failed --plain --no-legend")
    assert not re.search("forestage|slurm|munge", failed), failed


def test_systemd_units_run_and_log_to_the_journal(node: Node) -> None:
    node.type("mkdir -p /var/lib/prometheus/node-exporter")  # of a package that is not here
    node.type("systemctl enable --now forestage.timer")
    node.type("systemctl start forestage.service")
    assert node.type("systemctl show --property=Result forestage.service") == "Result=success\n"
    assert "forestage.timer" in node.type("systemctl list-timers --no-legend")
    assert node.type("ls /var/lib/prometheus/node-exporter") == "forestage.prom\n"
    node.type("systemctl start forestage.service")
    told = node.type("journalctl --no-pager --unit=forestage.service")
    assert "left-over" not in told, "what outlives a run is in forestage-hold.service"
    job = node.run()
    log = node.type("journalctl --no-pager --identifier=forestage")
    assert f"job={job} " in log
    found = json.loads(node.type("forestage check --json || true"))["findings"]
    levels = {one["id"] for one in found if one["level"] == "critical"}
    assert levels == set()


def test_warm_at_boot_copies_images_without_delaying_the_unit(node: Node) -> None:
    image, own = "/srv/images/boot.sqsh", "/etc/forestage/conf.d/boot.yaml"
    node.type(
        "mkdir /tmp/boot; head --bytes=16M /dev/urandom >/tmp/boot/blob;"
        f"mksquashfs /tmp/boot {image} -quiet -no-progress -noD"
    )
    node.type(f"printf 'warm_at_boot: [{image}]\nbandwidth: 1MiB\n' >{own}")
    try:
        node.type("systemctl start forestage.service")
        assert "Result=success" in node.type("systemctl show --property=Result forestage.service")
        node.type("test ! -e /run/forestage/warmed")  # the copy takes 16 s
        node.type(f"while ! forestage ls | grep -q {image}; do sleep 0.2; done")
        node.type("systemctl start forestage.service")
        node.type("test -e /run/forestage/warmed")
    finally:
        node.type(f"rm -f {own} {image} /run/forestage/warmed")


def test_package_upgrade_keeps_the_redirect_of_a_running_job(node: Node) -> None:
    with node.holding():
        assert node.redirected()
        node.install(RELEASES[1])
        assert node.redirected()
        assert RELEASES[1] in node.type("dpkg-query --show forestage")
    assert node.result(node.run()) == "hit", "it is not switched off any more"
    node.install(RELEASES[0])


def test_installed_byte_code_fits_the_nodes_python_and_is_not_rewritten(node: Node) -> None:
    """Else each start of a hook would compile it anew."""
    count = f"find {HOME}/lib -name '*.pyc' | wc -l"
    before = int(node.type(count))
    assert before > 300
    node.type("touch /root/installed")
    node.run()
    node.type("forestage report -o - >/dev/null; forestage status >/dev/null")
    assert node.type(f"find {HOME} -newer /root/installed") == ""


def test_dpkg_trigger_compiles_byte_code_for_another_python(node: Node) -> None:
    """As when the distribution is upgraded: dpkg runs postinstall's trigger."""
    node.type(f"find {HOME}/lib -name __pycache__ -prune -exec rm -r {{}} +")
    node.type("dpkg-trigger --by-package=dpkg /usr/bin/python3; dpkg --triggers-only forestage")
    assert int(node.type(f"find {HOME}/lib -name '*.pyc' | wc -l")) > 300
    assert node.type(f"readlink {HOME}/bin/python3") == "/usr/bin/python3\n"


def test_include_line_of_a_missing_companion_causes_no_message(node: Node) -> None:
    """By this Slurm, on a host without the companion, which `optional` alone would not be."""
    stack = node.machine.path("/etc/slurm/plugstack.conf")
    before = stack.read_text() if stack.exists() else ""
    try:
        stack.write_text(f"include {HOME}/spank/plugstack-22.05*.conf\n{before}")
        assert node.type("srun true 2>&1") == ""
    finally:
        stack.write_text(before)


def test_package_removal_under_a_running_job_fails_no_job_and_drains_no_node(node: Node) -> None:
    with node.holding():
        assert node.redirected()
        node.type("apt-get remove -y forestage")
        assert not node.redirected(), "else it would hide later changes of the source"
    assert not node.machine.path(HOME).exists(), "nothing of it is left"
    node.run()
    assert node.state() in ("idle", "completing")
    assert sorted(node.type(f"ls {HOOKS}").split()) == ["epilog", "prolog"]
    node.install(RELEASES[0])
    assert node.result(node.run()) == "hit"
