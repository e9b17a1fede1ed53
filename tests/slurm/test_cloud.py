"""packaging/cloud/prepare-node on a booted machine: by power saving, and with a dynamic node.

Its slurmd lies in /opt and gets its configuration from slurmctld. The companion is that which was
built here, for Debian 12's Slurm.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from newcomer import ADDRESS, HOST, Machine
from packaged import RELEASES
from spec import REPO
from suite import fresh

pytestmark = pytest.mark.long
IMAGE = "/srv/images/hello.sqsh"
SCRIPTS = "/opt/slurm/etc/scripts"  # as in ParallelCluster
# The image of a cloud node: Slurm in /opt, and nothing of forestage.
BAKED = """\
apt-get update -q
apt-get install -y slurmctld slurmd slurm-client munge squashfs-tools python3 libstdc++6
systemctl stop slurmd slurmctld
mkdir -p /opt/slurm/sbin /opt/slurm/etc /srv/images /tmp/hello
mkdir -p /etc/systemd/system/slurmctld.service.d
mv /usr/sbin/slurmd /opt/slurm/sbin/
printf 'SLURMCTLD_OPTIONS="-f /opt/slurm/etc/slurm.conf"\\n' >/etc/default/slurmctld
printf '[Unit]\\nConditionPathExists=\\n' >/etc/systemd/system/slurmctld.service.d/opt.conf
"""
# -b: just booted. Slurm does not believe in a node whose kernel is older than its resume.
SLURMD = f"""\
[Service]
EnvironmentFile=-/run/slurmd.options
ExecStart=/opt/slurm/sbin/slurmd -D -b --conf-server {HOST}:6817 $OPTIONS
KillMode=process
Delegate=yes
"""
CONF = f"""\
ClusterName=cloud
SlurmctldHost={HOST}({ADDRESS})
SlurmUser=root
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
SlurmctldParameters=enable_configless,idle_on_node_suspend
TreeWidth=65533
PrivateData=cloud
MaxNodeCount=4
SuspendProgram=/opt/slurm/etc/suspend
ResumeProgram=/opt/slurm/etc/resume
ResumeTimeout=200
SuspendTimeout=20
SuspendTime=3600
PrologFlags=Alloc,DeferBatch
Prolog={SCRIPTS}/prolog.d/*
Epilog={SCRIPTS}/epilog.d/*
NODES
PartitionName=all Nodes=ALL Default=YES
"""
POWERED = f"NodeName={HOST} NodeAddr={ADDRESS} CPUs=1 State=CLOUD"
BOOT = """\
#!/bin/sh
/root/prepare-node --sources /srv/images --packages /root/packages \
    --cache /var/cache/forestage >>/root/boot.log 2>&1 && systemctl start slurmd
"""
# `PlugStackConfig` is not sent to configless nodes, but the file beside slurm.conf is.
START = """\
mkdir -p /etc/forestage/conf.d
echo 'require_mount: false' >/etc/forestage/conf.d/60-site.yaml
echo hello, world >/tmp/hello/greeting
mksquashfs /tmp/hello /srv/images/hello.sqsh -noD -quiet -no-progress
chmod 755 /opt/slurm/etc/resume /opt/slurm/etc/suspend /root/prepare-node
systemctl daemon-reload
systemctl restart munge slurmctld
"""


class Cloud:
    """The head node and its only compute node, which are one machine."""

    def __init__(self, machine: Machine, built: Path) -> None:
        self.machine = machine
        machine.type(BAKED)
        packages = machine.path("/root/packages")
        packages.mkdir()
        for pattern in (f"forestage_{RELEASES[0]}-1_*.deb", f"forestage-spank_{RELEASES[0]}*.deb"):
            for file in built.glob(pattern):
                shutil.copy(file, packages)
        shutil.copy(REPO / "packaging/cloud/prepare-node", machine.path("/root"))
        for kind in ("prolog", "epilog"):
            folder = machine.path(f"{SCRIPTS}/{kind}.d")
            folder.mkdir(parents=True)
            shutil.copy(REPO / f"packaging/{kind}.d/50-all-forestage", folder)
        self.write("/etc/systemd/system/slurmd.service", SLURMD)
        self.write("/opt/slurm/etc/slurm.conf", CONF.replace("NODES", POWERED))
        line = "include /usr/lib/forestage/spank/plugstack-22.05*.conf\n"
        self.write("/opt/slurm/etc/plugstack.conf", line)
        self.write("/opt/slurm/etc/resume", BOOT)
        self.write("/opt/slurm/etc/suspend", "#!/bin/sh\nsystemctl stop slurmd\n")
        machine.type(START)

    def write(self, path: str, text: str) -> None:
        self.machine.path(path).write_text(text)

    def type(self, block: str) -> str:
        return self.machine.type(f"export SLURM_CONF=/opt/slurm/etc/slurm.conf\n{block}")

    def job(self) -> str:
        """What forestage tells of a new job, which reads the image."""
        script = f"unsquashfs -cat {IMAGE} greeting; echo $SLURM_JOB_ID"
        said = self.type(f"srun --comment=stage={IMAGE} sh -c '{script}'")
        greeting, number = said.split("\n")[:2]
        assert greeting == "hello, world"
        return self.type(f"forestage explain {number}")

    def boots(self) -> int:
        return self.machine.path("/root/boot.log").read_text().count("\n")


@pytest.fixture(scope="module")
def cloud(
    machine: None,
    built: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cloud]:
    with Machine(fresh("bookworm"), tmp_path_factory.mktemp("cloud")) as machine:
        yield Cloud(machine, built)


def test_node_that_power_saving_starts_ends_in_a_hit(cloud: Cloud) -> None:
    assert not cloud.machine.path("/usr/lib/forestage").exists(), "nothing was there before"
    first, second = cloud.job(), cloud.job()
    log = cloud.machine.path("/root/boot.log").read_text()
    assert "hit" in second, (first, second, log)
    conf = cloud.machine.path("/etc/forestage/conf.d/40-boot.yaml").read_text()
    assert "redirect" not in conf
    assert "redirect by the SPANK plugin" in second, second
    assert "forestage-sweep.timer" in cloud.type("systemctl list-timers --no-legend")


def test_node_that_comes_back_is_prepared_once_more_and_has_its_cache(cloud: Cloud) -> None:
    cloud.type(f"scontrol update NodeName={HOST} State=POWER_DOWN_FORCE")
    cloud.type(f"until scontrol show node {HOST} | grep -q POWERED_DOWN; do sleep 0.5; done")
    assert "hit" in cloud.job()


def test_node_that_registers_itself_ends_in_a_hit(cloud: Cloud) -> None:
    """A dynamic node: slurm.conf names none."""
    cloud.type("systemctl stop slurmd slurmctld; rm -rf /var/lib/slurm/slurmctld/*")
    cloud.write("/opt/slurm/etc/slurm.conf", CONF.replace("NODES\n", ""))
    cloud.write("/run/slurmd.options", "OPTIONS=-Z --conf CPUs=1\n")
    cloud.type("systemctl start slurmctld; sh /opt/slurm/etc/resume")
    cloud.type("until sinfo -hN -o %T | grep -q idle; do sleep 0.5; done")
    cloud.job()
    assert "hit" in cloud.job()
