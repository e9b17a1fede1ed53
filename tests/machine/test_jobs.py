"""Jobs under systemd, cgroup v2 and Slurm's limits: what they see, where processes live."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from compute import IMAGES, Compute, command

from forestage.cache.part import PROCESS_NAME as STAGER
from forestage.features.data.job_disk import PROCESS_NAME as HOLDER
from forestage.features.data.squashfs_server import PROCESS_NAME as MOUNTER
from forestage.features.registry.step_files import PROCESS_NAME as IMPORTING
from forestage.system.pid_namespace import PROCESS_NAME as INIT
from forestage.views.through.keeper import PROCESS_NAME as KEEPER
from forestage.views.through.keeper import SERVER_NAME as SERVER

POINT = "/tmp/alice/point"
SQUASHFUSE = "squashfuse"  # before 0.2 squashfuse_ll cannot say whose the files are
HOLD = "/system.slice/forestage-hold.service"
# 22.05: a scope beside slurmd.service, which a restart of slurmd does not touch.
STEP = re.compile(r"^/system\.slice/\w+_slurmstepd\.scope/job_\d+/step_0/user/task_0$")
TESTS = Path(__file__).parents[1]
IMPORTER = "/usr/lib/forestage/bin/forestage-importer"
PYXIS = f"required /usr/local/lib/pyxis.so container=no importer={IMPORTER}"
# With a digest no registry is asked.
REFERENCE = f"registry.example#team/tool@sha256:{64 * 'a'}"
SLOW, CRAWLS = "bandwidth: 1MiB\n", "bandwidth: 100KiB\n"
# A package of the same files whose version is higher; the old one is what the machine was made of.
UPGRADE = """\
cd /tmp
rm -rf newer newer.deb
dpkg-deb -R /root/forestage_*.deb newer
sed -i 's/^Version: .*/&+newer/' newer/DEBIAN/control
dpkg-deb -Znone -b newer newer.deb >&2
dpkg -i newer.deb >&2
rm -rf newer newer.deb
dpkg-query -W -f '${Version}' forestage
"""


def everything(node: Compute) -> tuple[str, str]:
    """A comment, and what a job does first, to have all processes of forestage's at work."""
    image, mounted = node.image("image", mib=16), node.image("mounted", mib=1)
    node.run(
        f"mkdir -p /export/images/set {POINT}; echo 1 >/export/images/set/1;"
        "chown -R alice: /export/images/set /tmp/alice"
    )
    stage = f"stage={image.path} stage={mounted.path}@{POINT} stage={IMAGES}/set/ stage-dir=50MiB"
    return stage, f"cat {POINT}/name; head -c 9 {image.path}"


def test_cancelled_job_that_uses_every_feature_leaves_nothing_on_the_node(node: Compute) -> None:
    with node.configured(CRAWLS), node.holding(*everything(node)):
        lives = node.processes()
        node.run("scancel --user=alice")
        node.idle()
    assert {KEEPER, SERVER, STAGER, HOLDER, MOUNTER, INIT, SQUASHFUSE} <= set(lives), lives
    assert node.left() == ""


def test_processes_run_in_the_hold_services_cgroups_or_in_the_users_step(
    node: Compute,
) -> None:
    with node.configured(CRAWLS), node.holding(*everything(node)):
        lives = node.processes()
    assert lives.pop(STAGER) == {f"{HOLD}/copy"}
    (group,) = lives.pop(SQUASHFUSE)
    assert STEP.match(group), group
    assert set(lives) >= {KEEPER, SERVER, HOLDER, MOUNTER, INIT}
    assert {group for groups in lives.values() for group in groups} == {f"{HOLD}/serve"}


def with_pyxis(node: Compute, folder: Path) -> None:
    """Stand-ins for pyxis and enroot, until the cluster's plugstack.conf is put back."""
    made = folder / "pyxis.so"
    subprocess.run(["make", "-s", "-C", TESTS / "slurm/pyxis", f"OUT={made}"], check=True)
    node.vm.put("/usr/local/lib/pyxis.so", made.read_bytes())
    node.vm.put("/usr/local/bin/enroot", (TESTS / "features/registry/registry/enroot").read_bytes())
    node.run(
        "chmod 755 /usr/local/bin/enroot; cd /etc/slurm; cp plugstack.conf before;"
        f"echo '{PYXIS}' >>plugstack.conf; mkdir -m 1777 /export/images/store"
    )


def test_registry_worker_runs_in_its_steps_cgroup_and_ends_with_the_step(
    node: Compute, tmp_path: Path
) -> None:
    image = node.image("imported", mib=1)
    with_pyxis(node, tmp_path)
    given = f"STANDIN_IMAGE={image.path} STANDIN_WAIT=/tmp/never"
    try:
        with node.configured(f"registry: {{store: {IMAGES}/store}}\n"):
            job = node.begin(f"{given} srun --container-image={REFERENCE} true", user="alice")
            node.until("pgrep -f '[e]nroot import'")
            lives = node.run("ps -u alice -o cgroup:200=,args= | grep -E '[e]nroot |registry[.]w'")
            helpers = node.processes()
            node.run("scancel --user=alice")
            assert job.wait().code != 0
            node.idle()
    finally:
        node.run("cd /etc/slurm; mv before plugstack.conf")
    print(lives.out, helpers)
    groups = [line.split()[0].removeprefix("0::") for line in lives.out.splitlines()]
    assert len(groups) >= 2
    assert [one for one in groups if not STEP.match(one)] == []
    assert helpers[IMPORTING] == {f"{HOLD}/serve"}
    node.until("! pgrep -f '[e]nroot import|[r]egistry.work'")
    assert node.left() == ""


def test_copy_with_less_memory_than_the_image_is_right_without_an_oom_kill(node: Compute) -> None:
    image = node.image("large", mib=96)
    leaf = "/run/forestage/hold/copy"
    node.run(f"echo 48M >{leaf}/memory.max")
    try:
        assert image.seen(node.srun(f"stage={image.path} stage-wait=10m", image.look))
        assert "oom_kill 0" in node.run(f"cat {leaf}/memory.events").out
    finally:
        node.run(f"echo max >{leaf}/memory.max")
    node.run("forestage verify --all")
    assert len(node.entries()) == 1


def test_job_keeps_its_image_and_directory_while_slurmd_is_restarted(node: Compute) -> None:
    image = node.image("image", mib=24)
    # Once, on a busy computer, nothing came of its last line: now the end of cat tells whether srun
    # lost its output.
    look = (
        f"sha256sum <{image.path}; findmnt -n -o FSTYPE -T {image.path};"
        " cat $FORESTAGE_DIR/mine; echo ended $?"
    )
    first = "echo kept >$FORESTAGE_DIR/mine"
    stage = f"stage={image.path} stage-dir=50MiB"
    with node.configured(SLOW), node.holding(stage, first, look) as job:
        node.run("systemctl restart slurmd")
        node.until("sinfo -h -o %T | grep -qE 'mixed|allocated'")
    done = job.wait()
    wanted = (0, [image.sha256, "-", "fuse.forestage", "kept", "ended", "0"])
    assert (done.code, done.out.split()) == wanted, done.err
    node.idle()
    assert node.left() == ""


def test_job_keeps_its_image_and_directory_while_the_package_is_upgraded(node: Compute) -> None:
    image = node.image("image", mib=24)
    look = f"sha256sum <{image.path}; findmnt -n -o FSTYPE -T {image.path}; cat $FORESTAGE_DIR/mine"
    first = f"echo kept >$FORESTAGE_DIR/mine; head -c 9 {image.path} >/dev/null"
    stage = f"stage={image.path} stage-dir=50MiB"
    with node.configured(CRAWLS), node.holding(stage, first, look) as job:
        assert node.run(UPGRADE).out.endswith("+newer")
    done = job.wait()
    assert (done.code, done.out.split()) == (0, [image.sha256, "-", "fuse.forestage", "kept"])
    node.idle()
    assert node.left() == ""
    assert image.seen(node.srun(f"stage={image.path} stage-wait=5m", image.look))


def test_job_directory_in_memory_counts_as_the_jobs_memory_and_an_excess_kills_the_job(
    node: Compute,
) -> None:
    fill = "head -c 60M /dev/zero >$FORESTAGE_DIR/x; findmnt -n -o FSTYPE -T $FORESTAGE_DIR"
    group = "$(sed -n 's,^0::,,p' /proc/self/cgroup | cut -d/ -f1-4)"
    memory = f"cat /sys/fs/cgroup{group}/memory.current"
    done = node.srun("stage-dir=100MiB,ram", f"{fill}; {memory}", "--mem=200")
    kind, used = done.out.split()
    assert (done.code, kind) == (0, "tmpfs")
    assert int(used) > 60 << 20
    more = "python3 -c 'x = bytearray(180 << 20)'; echo ended $?"
    script = command("stage-dir=100MiB,ram", f"{fill}; {more}", "--mem=200")
    killed = node.run(script, user="alice", check=False)
    assert killed.code != 0 or "ended 137" in killed.out, killed
    node.idle()
    assert node.left() == ""
    assert node.srun("stage-dir=100MiB,ram", fill, "--mem=200").out.split() == ["tmpfs"]
