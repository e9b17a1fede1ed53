"""The Ansible role on booted machines: dry run, installed, run again, after hand edits, removed.

ansible-core comes from PyPI into an environment of its own. It reaches the machine by ssh, whose
other end is an sshd in the machine's namespaces (`sshd -i`): no network is needed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from newcomer import HOST, Machine, blocks, told
from packaged import RELEASES
from spec import REPO
from suite import fresh

from forestage import events
from forestage.events import RequestOutcome

pytestmark = pytest.mark.long
ANSIBLE = "ansible-core>=2.14,<2.20"  # of this machine's Python 3.11, and of the nodes'
ROLE = REPO / "packaging/ansible"
IMAGE = "/srv/images/hello.sqsh"
# What a node has before the role comes: Slurm with a directory of Prologs, and sshd.
SITE = """\
apt-get update -q
apt-get install -y --no-install-recommends openssh-server python3 python3-apt
apt-get install -y munge rsync e2fsprogs zstd libstdc++6 squashfs-tools
apt-get install -y slurmctld slurmd slurm-client
mkdir -p /run/sshd /root/.ssh /srv/images /etc/slurm/prolog.d /tmp/hello
"""
PROLOGS = """\
printf '#!/bin/sh\\ntouch /run/site-prolog\\n' >/etc/slurm/prolog.d/20-site
chmod 755 /etc/slurm/prolog.d/20-site
echo 'Prolog=/etc/slurm/prolog.d/*' >>/etc/slurm/slurm.conf
echo hello, world >/tmp/hello/greeting
mksquashfs /tmp/hello /srv/images/hello.sqsh -noD -quiet -no-progress
scontrol reconfigure
"""
VARIABLES: dict[str, object] = {
    "forestage_config": {
        "sources": ["/srv/images"],
        "cache": "/var/cache/forestage",
        "require_mount": False,
    },
    "forestage_edit_slurm_files": True,
}


@pytest.fixture(scope="module")
def ansible(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Ansible's programs."""
    folder = tmp_path_factory.mktemp("ansible")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, ANSIBLE], check=True, capture_output=True)
    return folder / "bin"


class Control:
    """The control host of a machine."""

    def __init__(self, machine: Machine, ansible: Path, folder: Path, package: Path) -> None:
        self.machine = machine
        self._ansible = ansible
        self._package = package
        self._inventory = folder / "inventory"
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", key], check=True)
        authorized = machine.path("/root/.ssh/authorized_keys")
        authorized.write_text(key.with_suffix(".pub").read_text())
        authorized.chmod(0o600)
        sshd = shlex.join([*machine.enter, "--net", "/usr/sbin/sshd", "-i"])
        options = [f"-oProxyCommand={sshd}", f"-oIdentityFile={key}", "-oStrictHostKeyChecking=no"]
        options += [f"-oUserKnownHostsFile={folder}/known", "-oControlMaster=no"]
        self._inventory.write_text(
            "[compute]\n"
            f"{HOST} ansible_user=root ansible_python_interpreter=/usr/bin/python3"
            f" ansible_ssh_common_args={shlex.quote(shlex.join(options))}\n"
        )

    def play(self, *options: str, **variables: object) -> dict[str, Any]:
        """Runs the example; what Ansible counts of the node, and all it said as `said`."""
        given = {**VARIABLES, "forestage_packages": [str(self._package)], **variables}
        argv = ["ansible-playbook", f"--inventory={self._inventory}", "--diff"]
        argv += [f"--extra-vars={json.dumps(given)}", *options, str(ROLE / "playbook.yml")]
        return self._run(argv)

    def type(self, block: str) -> dict[str, Any]:
        """The same of what somebody types where the sites' files, an inventory and packages lie."""
        shutil.copytree(ROLE, self._inventory.parent / "ansible")
        shutil.copy(self._package, self._inventory.parent)
        return self._run(["sh", "-eu", "-c", block])

    def _run(self, argv: list[str]) -> dict[str, Any]:
        folder = self._inventory.parent
        env = {**os.environ, "ANSIBLE_NOCOLOR": "1", "LC_ALL": "C.UTF-8"}
        env |= {"ANSIBLE_LOCAL_TEMP": f"{folder}/tmp"}
        env["PATH"] = f"{self._ansible}:{env['PATH']}"
        done = subprocess.run(
            argv, env=env, cwd=folder, capture_output=True, text=True, timeout=900
        )
        recap = re.findall(r"(\w+)=(\d+)", done.stdout.rpartition("PLAY RECAP")[2])
        counts = {name: int(value) for name, value in recap}
        assert counts, (done.stdout[-6000:], done.stderr[-3000:])
        return {**counts, "said": done.stdout + done.stderr}

    def result(self) -> str:
        """What the Prolog did for the image of a new job."""
        script = f"unsquashfs -cat {IMAGE} greeting; echo $SLURM_JOB_ID"
        said = self.machine.type(f"srun --comment=stage={IMAGE} sh -c '{script}'")
        greeting, number = said.split("\n")[:2]
        assert greeting == "hello, world"
        logged = events.read_events(self.machine.path("/var/log/forestage/events.jsonl"))
        found = [one.outcome for one in logged if (one.job, one.hook) == (int(number), "prolog")]
        assert all(isinstance(one, RequestOutcome) for one in found)
        return found[0].result if found else "not asked"

    def state(self) -> str:
        return self.machine.type("sinfo --noheader --format %T").strip()


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def control(
    machine: None,
    built: Path,
    ansible: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Control]:
    with Machine(fresh(request.param), tmp_path_factory.mktemp(request.param)) as booted:
        booted.type(SITE)
        booted.type(blocks(REPO / "docs/install.md")[1])  # a Slurm of one node
        booted.type(PROLOGS)
        (package,) = built.glob(f"forestage_{RELEASES[0]}-1_*.deb")
        yield Control(booted, ansible, tmp_path_factory.mktemp("control"), package)


def test_ansible_role_installs_is_idempotent_and_uninstalls(control: Control) -> None:
    """One test: each part begins where the one before has ended."""
    machine = control.machine

    # A dry run changes nothing, though it cannot tell what comes after the package.
    dry = control.play("--check")
    assert dry["failed"] == 0, dry["said"]
    assert "cannot be foretold" in dry["said"]
    assert not machine.path("/usr/lib/forestage").exists()
    assert not machine.path("/var/lib/forestage-packages").exists()

    first = control.play()
    assert (first["failed"], first["changed"] > 0) == (0, True), first["said"]
    assert machine.type("ls /etc/slurm/prolog.d").split() == ["20-site", "50-forestage"]
    conf = machine.path("/etc/slurm/slurm.conf")
    assert "\nEpilog=/usr/libexec/forestage/epilog\n" in conf.read_text()
    assert "\nProlog=/usr/libexec" not in conf.read_text(), "there is the link"
    units = "forestage.timer forestage-peer.service"
    state = machine.type(f"systemctl is-enabled {units}; systemctl is-active {units}")
    assert state.split() == ["enabled", "enabled", "active", "active"]
    assert [control.result(), control.result()] == ["copied", "hit"]
    assert machine.path("/run/site-prolog").exists(), "the site's own ran as well"

    second = control.play()
    assert (second["failed"], second["changed"]) == (0, 0), second["said"]

    # What somebody has written by hand stays, and is no reason for a change.
    yaml = machine.path("/etc/forestage/forestage.yaml")
    yaml.write_text(f"{yaml.read_text()}\nlow_watermark: 40%\n")
    line = "epilog = /usr/libexec/forestage/epilog # ours"
    conf.write_text(conf.read_text().replace("Epilog=/usr/libexec/forestage/epilog", line))
    for options in (("--check",), ()):
        edited = control.play(*options)
        assert (edited["failed"], edited["changed"]) == (0, 0), edited["said"]
    assert line in conf.read_text()
    assert "low_watermark: 40%" in yaml.read_text()
    assert control.result() == "hit"

    # What the role itself has written is the role's, and a bad value is told.
    own = machine.path("/etc/forestage/conf.d/50-ansible.yaml")
    own.write_text("sources: [/elsewhere]\n")
    assert control.play()["changed"] == 1
    assert control.result() == "hit"
    bad = control.play(forestage_config={"sorces": ["/srv/images"]})
    assert (bad["failed"], "sorces" in bad["said"]) == (1, True)
    assert control.play()["failed"] == 0

    gone = control.play(forestage_state="absent")
    assert gone["failed"] == 0, gone["said"]
    assert not machine.path("/usr/lib/forestage").exists()
    assert machine.type("ls /etc/slurm/prolog.d").split() == ["20-site"]
    assert "forestage" not in conf.read_text()
    before = machine.path("/var/log/forestage/events.jsonl").read_text()
    assert control.result() == "not asked"
    assert machine.path("/var/log/forestage/events.jsonl").read_text() == before
    assert control.state() in ("idle", "completing")
    again = control.play(forestage_state="absent")
    assert (again["failed"], again["changed"]) == (0, 0), again["said"]


def test_ansible_role_refuses_to_replace_a_sites_own_prolog(control: Control) -> None:
    """A site's own script in `Prolog=`: it is not replaced, and the node does not drain."""
    conf = control.machine.path("/etc/slurm/slurm.conf")
    before = conf.read_text()
    own = "/etc/slurm/prolog.d/20-site"
    conf.write_text(before.replace("Prolog=/etc/slurm/prolog.d/*", f"Prolog={own}"))
    try:
        done = control.play()
        assert done["failed"] == 1
        assert f"Prolog={own} is there already" in done["said"]
        assert "libexec" not in conf.read_text()
        assert control.result() == "not asked"
    finally:
        conf.write_text(before)
        assert control.play(forestage_state="absent")["failed"] == 0


def test_commands_of_the_ansible_page_install_the_package(control: Control) -> None:
    (block,) = told("test_ansible.py")
    done = control.type(block)
    assert done["failed"] == 0, done["said"]
    assert "PrologFlags" not in done["said"], "which are there already"
    assert "Epilog=/usr/libexec/forestage/epilog" in done["said"], "the line is shown"
    written = control.machine.path("/etc/forestage/conf.d/50-ansible.yaml").read_text()
    assert "- /lustre\n" in written
