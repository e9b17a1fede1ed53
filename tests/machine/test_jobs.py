"""Jobs under systemd, cgroup v2 and Slurm's limits: what they see, where processes live."""

from __future__ import annotations

import re

from compute import Compute
from install import CACHE

from forestage.cache.part import PROCESS_NAME as STAGER
from forestage.through.living import PROCESS_NAME as KEEPER
from forestage.through.living import SERVER_NAME as SERVER

POINT = "/tmp/alice/point"
# 22.05: a scope beside slurmd.service, which a restart of slurmd does not touch.
STEP = re.compile(r"^/system\.slice/\w+_slurmstepd\.scope/job_\d+/step_0/user/task_0$")
SLOW = "bandwidth: 1MiB\n"


def test_directory_is_the_shared_one_and_then_an_erofs_of_the_nodes_own(node: Compute) -> None:
    path = "/lustre/images/set"
    node.run(
        "mkdir -p /export/images/set/deep; cd /export/images/set;"
        "for i in $(seq 300); do echo $i >deep/$i; done; chown -R alice: ."
    )
    look = (
        f"cd {path}; find . -type f | sort | xargs sha256sum | sha256sum; findmnt -n -o FSTYPE -T ."
    )
    plain = node.run(look, user="alice").out.split()[0]
    cold = node.srun(f"stage={path}/", look).out.split()
    assert (cold[0], cold[-1]) == (plain, "nfs4")
    node.until(f'test -n "$(ls {CACHE}/entries)"')
    warm = node.srun(f"stage={path}/", look).out.split()
    assert (warm[0], warm[-1]) == (plain, "erofs")


def test_job_with_all_there_is_leaves_nothing_after_scancel(node: Compute) -> None:
    image, mounted = node.image("image", mib=16), node.image("mounted", mib=1)
    node.run("mkdir -p /export/images/set; echo 1 >/export/images/set/1; mkdir -p /tmp/alice/point")
    node.run("chown -R alice: /export/images/set /tmp/alice")
    stage = (
        f"stage={image.path} stage={mounted.path}@{POINT} stage=/lustre/images/set/ stage-dir=50MiB"
    )
    before = node.left()
    with node.configured(SLOW), node.holding(stage, f"cat {POINT}/name; head -c 9 {image.path}"):
        lives = node.processes()
        node.run("scancel --user=alice")
        node.until('test -z "$(squeue -h)"')
        node.until("sinfo -h -o %T | grep -qx idle")
    assert {KEEPER, SERVER, STAGER} <= set(lives), lives
    # A copy that no job needs goes on.
    node.until(f"! pgrep -x {STAGER}")
    node.until("! pgrep forestage")
    assert node.left() == before == ""
    assert node.run("sinfo -h -o %T").out == "idle\n"


def test_servers_live_outside_of_the_job_and_what_the_user_can_reach_inside(node: Compute) -> None:
    image, mounted = node.image("image", mib=16), node.image("mounted", mib=1)
    node.run("mkdir -p /tmp/alice/point; chown -R alice: /tmp/alice")
    stage = f"stage={image.path} stage={mounted.path}@{POINT}"
    with node.configured(SLOW), node.holding(stage, f"cat {POINT}/name"):
        lives = node.processes()
    for name in (STAGER, KEEPER, SERVER):
        assert lives[name] == {"/"}, lives
    (group,) = lives["squashfuse_ll"]
    assert STEP.match(group), lives


def test_slurmd_restarted_under_a_job_that_reads_through_changes_nothing_for_it(
    node: Compute,
) -> None:
    image = node.image("image", mib=24)
    look = f"sha256sum <{image.path}; findmnt -n -o FSTYPE -T {image.path}"
    with node.configured(SLOW), node.holding(f"stage={image.path}", "true", look) as job:
        node.run("systemctl restart slurmd")
        node.until("sinfo -h -o %T | grep -qE 'mixed|allocated'")
    done = job.wait()
    assert done.code == 0, done.err
    assert done.out.split()[::2][0] == image.sha256
    assert "fuse.forestage" in done.out
    node.until("sinfo -h -o %T | grep -qx idle")
