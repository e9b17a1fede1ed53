"""packaging/cloud/prepare-node on a booted machine: by power saving, and with a dynamic node.

Its slurmd lies in /opt and gets its configuration from slurmctld. The companion is that which was
built here, for Debian 12's Slurm; on Debian 13 there is none. docs/sites.md is followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from newcomer import ADDRESS, HOST, Machine, told
from packaged import RELEASES
from suite import fresh

pytestmark = pytest.mark.long
IMAGE = "/fsx/hello.sqsh"
SCRIPTS = "/opt/slurm/etc/scripts"  # as in ParallelCluster
# The image of a cloud node: Slurm in /opt, and nothing of forestage. Its ResumeProgram needs root,
# so SlurmUser is root, for which slurmctld dumps core under Debian 13's `User=slurm`.
BAKED = """\
apt-get update -q
apt-get install -y slurmctld slurmd slurm-client munge squashfs-tools python3 libstdc++6
systemctl stop slurmd slurmctld
mkdir -p /opt/slurm/sbin /opt/slurm/etc/scripts/prolog.d /opt/slurm/etc/scripts/epilog.d
mkdir -p /sched/CLUSTER/prolog.d /sched/CLUSTER/epilog.d /shared /fsx /tmp/hello
mkdir -p /etc/systemd/system/slurmctld.service.d
mv /usr/sbin/slurmd /opt/slurm/sbin/
printf 'SLURMCTLD_OPTIONS="-f /opt/slurm/etc/slurm.conf"\\n' >/etc/default/slurmctld
cat >/etc/systemd/system/slurmctld.service.d/opt.conf <<END
[Unit]
ConditionPathExists=
[Service]
User=root
Group=root
END
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
PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
{
%s} >>/root/boot.log 2>&1
systemctl start slurmd
"""
# `PlugStackConfig` is not sent to configless nodes, but the file beside slurm.conf is.
START = """\
mkdir -p /etc/forestage/conf.d
printf 'cache: /var/cache/forestage\\nrequire_mount: false\\n' >/etc/forestage/conf.d/60-site.yaml
echo hello, world >/tmp/hello/greeting
mksquashfs /tmp/hello /fsx/hello.sqsh -noD -quiet -no-progress
chmod 755 /opt/slurm/etc/resume /opt/slurm/etc/suspend
install -m 755 cloud/prepare-node /usr/local/sbin/
systemctl daemon-reload
systemctl restart munge slurmctld
"""


class Cloud:
    """The head node and its only compute node, which are one machine."""

    def __init__(self, machine: Machine, built: Path, suite: str) -> None:
        self.machine = machine
        self.has_companion = suite == "bookworm"
        machine.type(BAKED)
        names = ("_{}-1_*.deb", "-spank_{}*.deb", "-sites-{}.tar.gz")
        for name in names:
            (file,) = built.glob("forestage" + name.format(RELEASES[0]))
            machine.put(file)
        machine.type("tar -xzf forestage-sites-*.tar.gz --strip-components=2")
        boot, *clouds = told("test_cloud.py")
        assert len(clouds) == 3
        for block in clouds:
            machine.type(block)
        self.write("/etc/systemd/system/slurmd.service", SLURMD)
        self.write("/opt/slurm/etc/slurm.conf", CONF.replace("NODES", POWERED))
        line = "include /usr/lib/forestage/spank/plugstack-22.05*.conf\n"
        self.write("/opt/slurm/etc/plugstack.conf", line)
        self.write("/opt/slurm/etc/resume", BOOT % boot)
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


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def cloud(
    machine: None,
    built: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cloud]:
    suite = str(request.param)
    with Machine(fresh(suite), tmp_path_factory.mktemp("cloud")) as machine:
        yield Cloud(machine, built, suite)


def test_shared_cloud_hook_scripts_exit_0_without_the_package(cloud: Cloud) -> None:
    assert not cloud.machine.path("/usr/lib/forestage").exists()
    for folder in (SCRIPTS, "/opt/apps/adm/slurm", "/sched/CLUSTER"):
        for kind in ("prolog", "epilog"):
            cloud.type(f"for one in {folder}/{kind}*.d/*; do test -x $one && $one; done")


def test_second_job_on_a_node_started_by_power_saving_is_a_hit(cloud: Cloud) -> None:
    assert not cloud.machine.path("/usr/lib/forestage").exists(), "nothing was there before"
    first, second = cloud.job(), cloud.job()
    log = cloud.machine.path("/root/boot.log").read_text()
    assert "hit" in second, (first, second, log)
    conf = cloud.machine.path("/etc/forestage/conf.d/40-boot.yaml").read_text()
    assert ("redirect: bind" not in conf) == cloud.has_companion
    assert ("redirect by the SPANK plugin" in second) == cloud.has_companion, second
    assert "forestage.timer" in cloud.type("systemctl list-timers --no-legend")


def test_enable_on_a_configless_node_recognizes_the_shared_hook_scripts(cloud: Cloud) -> None:
    ask = "forestage enable --json --slurm-conf /run/slurm/conf/slurm.conf"
    plan = json.loads(cloud.type(ask))
    assert (plan["links"], plan["refusals"]) == ([], [])
    assert [one["text"] for one in plan["lines"] if "log" in one["text"]] == []


def test_node_powered_down_and_up_again_keeps_its_cache_and_has_a_hit(cloud: Cloud) -> None:
    cloud.type(f"scontrol update NodeName={HOST} State=POWER_DOWN_FORCE")
    cloud.type(f"until scontrol show node {HOST} | grep -q POWERED_DOWN; do sleep 0.5; done")
    assert "hit" in cloud.job()


def test_second_job_on_a_dynamic_node_is_a_hit(cloud: Cloud) -> None:
    """A dynamic node: slurm.conf names none."""
    cloud.type("systemctl stop slurmd slurmctld; rm -rf /var/lib/slurm/slurmctld/*")
    cloud.write("/opt/slurm/etc/slurm.conf", CONF.replace("NODES\n", ""))
    cloud.write("/run/slurmd.options", "OPTIONS=-Z --conf CPUs=1\n")
    cloud.type("systemctl start slurmctld; sh /opt/slurm/etc/resume")
    cloud.type("until sinfo -hN -o %T | grep -q idle; do sleep 0.5; done")
    cloud.job()
    assert "hit" in cloud.job()


def test_cyclecloud_project_script_writes_the_nodes_configuration(cloud: Cloud) -> None:
    spec = "/root/PROJECT/specs/execute/cluster-init"
    cloud.type(f"CYCLECLOUD_SPEC_PATH={spec} {spec}/scripts/50-forestage.sh")
    conf = cloud.machine.path("/etc/forestage/conf.d/40-boot.yaml").read_text()
    assert "sources: [/shared]\n" in conf
