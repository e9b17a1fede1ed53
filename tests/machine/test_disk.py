"""The cache's disk hangs, fails, is full, read-only, or not there: jobs do not notice, it heals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from compute import OFF, Compute, Image, command
from install import CACHE
from vm import NVME

HUNG = 300  # seconds: who has not ended after that waits for the disk; many times what it takes
# The members of the array are reached through device-mapper from now on, until the next boot.
MAPPED = """\
if dmsetup info member0 >/dev/null 2>&1; then exit 0; fi
until umount /mnt/nvme; do fuser -vm /mnt/nvme >&2 || :; sleep 1; done
mdadm --stop /dev/md/nvme
for n in 0 1; do
    size=$(blockdev --getsz /dev/nvme${n}n1)
    dmsetup create member$n --table "0 $size linear /dev/nvme${n}n1 0"
done
udevadm settle
test -e /dev/md/nvme || mdadm --assemble --run /dev/md/nvme /dev/mapper/member0 /dev/mapper/member1
udevadm settle
mountpoint -q /mnt/nvme || mount -o prjquota /dev/md/nvme /mnt/nvme
lsblk -n -o NAME /dev/nvme1n1 | grep member1
"""
# Before the disk hangs: after it XFS may wait for it here, to write its quotas, with a lock of the
# whole kernel's that systemd needs to make a cgroup.
FORGET = "sync; echo 3 >/proc/sys/vm/drop_caches\n"
FAIL = """\
dmsetup suspend --nolockfs member1
dmsetup load member1 --table "0 $(blockdev --getsz /dev/nvme1n1) error"
dmsetup resume member1
"""


def passes(node: Compute, image: Image) -> int:
    """A whole job, its Epilog as well, while the disk is as it is: its number."""
    script = command(f"stage={image.path}", f"{image.look}; echo $SLURM_JOB_ID")
    done = node.begin(script, user="alice").wait(HUNG)
    assert image.seen(done)
    node.idle(HUNG)
    return int(done.out.split()[-1])


def goes_by(node: Compute, image: Image) -> tuple[str, str]:
    """What such a job got, and why."""
    job = passes(node, image)
    last = [one.outcome for one in node.outcomes(job) if one.hook in ("prolog", "step")][-1]
    return last.result, last.reason


def heals(node: Compute, image: Image) -> None:
    """The next jobs find the image in the cache again, and nothing is left of what went before."""
    node.run("forestage sweep")
    node.srun(f"stage={image.path} stage-wait=5m", "true")
    assert goes_by(node, image)[0] == "hit"
    assert node.left() == ""


@contextlib.contextmanager
def frozen(node: Compute) -> Iterator[None]:
    node.run("fsfreeze -f /mnt/nvme")
    try:
        yield
    finally:
        node.run("fsfreeze -u /mnt/nvme")


def test_frozen_disk_serves_hits_and_is_used_again_after_the_thaw(node: Compute) -> None:
    image, other = node.warm("frozen"), node.image("other")
    with frozen(node):
        assert goes_by(node, image)[0] == "hit"
        assert goes_by(node, other)[1] == "cache-hangs"
    heals(node, other)


def test_epilog_ends_though_the_disk_is_frozen_while_the_job_runs(node: Compute) -> None:
    image = node.warm("running")
    with node.holding(f"stage={image.path}", "true", image.look) as running, frozen(node):
        node.run(f"touch {OFF}")
        assert image.seen(running.wait(HUNG))
        node.idle(HUNG)
    heals(node, image)


@pytest.mark.releases
def test_step_reading_through_and_its_epilog_end_though_the_disk_is_frozen(
    node: Compute,
) -> None:
    image = node.image("through", mib=24)
    first = f"dd if={image.path} bs=64k count=1 of=/dev/null"
    with node.configured("bandwidth: 1MiB\n"):
        holding = node.holding(f"stage={image.path}", first, image.look)
        with holding as running, frozen(node):
            node.run(f"touch {OFF}")
            assert image.seen(running.wait(HUNG))
            node.idle(HUNG)
        heals(node, image)


@pytest.mark.parametrize("members", ["member0", "member1", "member0 member1"])
def test_hanging_raid_member_blocks_no_job_and_is_used_again_once_answering(
    node: Compute, members: str
) -> None:
    """Whichever has the file that the probe reads."""
    image = node.warm("hangs")
    node.run(MAPPED)
    node.run(f"{FORGET}for one in {members}; do dmsetup suspend --nolockfs $one; done")
    try:
        assert goes_by(node, image)[1] == "cache-hangs"
    finally:
        node.run(f"for one in {members}; do dmsetup resume $one; done")
    heals(node, image)


def test_jobs_run_without_a_hit_after_a_raid_member_failed(node: Compute) -> None:
    image, other = node.warm("fails"), node.image("other")
    node.run(MAPPED)
    node.run(FORGET + FAIL)
    try:
        goes_by(node, image)
        goes_by(node, other)
    finally:
        node.vm.cut_power()  # an XFS that has met this is mounted anew
        node.boot()
    heals(node, image)


def test_job_runs_without_a_copy_if_the_disk_is_full(node: Compute) -> None:
    image = node.image("full")
    node.run("fallocate -l $(($(df --output=avail -B1 /mnt/nvme | tail -1) - 2000000)) /mnt/nvme/x")
    try:
        # By the hook; or by the stager alone, as it may take longer here than a job waits for it.
        assert "(no-room)" in node.run(f"forestage explain {passes(node, image)}").out
    finally:
        node.run("rm /mnt/nvme/x")
    heals(node, image)


@pytest.mark.parametrize("cached", [True, False], ids=["hit", "cold"])
def test_job_reads_right_bytes_on_a_node_with_a_read_only_disk(node: Compute, cached: bool) -> None:
    image = node.warm("read-only") if cached else node.image("read-only")
    node.run("mount -o remount,ro /mnt/nvme")
    try:
        goes_by(node, image)
    finally:
        node.run("mount -o remount,rw /mnt/nvme")
    heals(node, image)


def test_job_runs_though_the_raid_is_missing_at_boot_and_the_root_disk_gets_no_cache(
    node: Compute,
) -> None:
    node.vm.power_off()
    node.vm.start(without=NVME[1:])
    try:
        node.until("mountpoint -q /lustre")
        node.until("sinfo -h -o %T | grep -qx idle")
        image = node.image("missing")
        assert goes_by(node, image)[1] == "cache-not-mounted"
        node.run(f"test ! -e {CACHE}; forestage check --json | grep -q cache-not-mounted")
    finally:
        node.vm.cut_power()
        node.boot()
    heals(node, image)
