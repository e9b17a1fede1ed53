"""The cache's disk hangs, fails, is full, read-only, or not there: jobs do not notice, it heals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from compute import Compute, Image, command
from install import CACHE
from vm import NVME

HUNG = 300  # seconds: who has not ended after that waits for the disk; many times what it takes
FROZEN = "V1: Prolog, step and Epilog wait for a cache disk that hangs, for as long as it does"
# The members of the array are reached through device-mapper from now on, until the next boot.
MAPPED = """\
umount /mnt/nvme
mdadm --stop /dev/md/nvme
for n in 0 1; do
    size=$(blockdev --getsz /dev/nvme${n}n1)
    dmsetup create member$n --table "0 $size linear /dev/nvme${n}n1 0"
done
test -e /dev/md/nvme || mdadm --assemble --run /dev/md/nvme /dev/mapper/member0 /dev/mapper/member1
udevadm settle
mountpoint -q /mnt/nvme || mount -o prjquota /dev/md/nvme /mnt/nvme
lsblk -n -o NAME /dev/nvme1n1 | grep member1
"""


def goes_by(node: Compute, image: Image) -> None:
    """A whole job, its Epilog as well, while the disk is as it is."""
    script = command(f"stage={image.path}", image.look)
    assert image.seen(node.begin(script, user="alice").wait(HUNG))
    node.idle(HUNG)


def heals(node: Compute, image: Image) -> None:
    """The next jobs find the image in the cache again, and nothing is left of what went before."""
    node.run("systemctl start forestage-sweep")
    node.srun(f"stage={image.path} stage-wait=5m", "true")
    done = node.srun(f"stage={image.path}", f"sha256sum <{image.path}; echo $SLURM_JOB_ID")
    assert image.seen(done)
    assert node.results(int(done.out.split()[-1]), "step") == ["hit"]
    node.idle()
    assert node.left() == ""


@contextlib.contextmanager
def frozen(node: Compute) -> Iterator[None]:
    node.run("fsfreeze -f /mnt/nvme")
    try:
        yield
    finally:
        node.run("fsfreeze -u /mnt/nvme")


@contextlib.contextmanager
def mapped(node: Compute, hurt: str, heal: str) -> Iterator[None]:
    node.run(MAPPED)
    node.run(hurt)
    try:
        yield
    finally:
        node.run(heal)


@pytest.mark.xfail(strict=True, reason=FROZEN)
@pytest.mark.parametrize("cached", [True, False], ids=["hit", "cold"])
def test_frozen_disk_holds_no_job_and_is_used_again_after_the_thaw(
    node: Compute, cached: bool
) -> None:
    image = node.warm("frozen")
    other = node.image("other")
    with frozen(node):
        goes_by(node, image if cached else other)
    heals(node, image)


@pytest.mark.xfail(strict=True, reason=FROZEN)
def test_disk_frozen_while_a_job_runs_holds_no_epilog(node: Compute) -> None:
    image = node.warm("running")
    with node.holding(f"stage={image.path}", "true", image.look) as running:
        node.run("fsfreeze -f /mnt/nvme")
    try:
        assert image.seen(running.wait(HUNG))
        node.idle(HUNG)
    finally:
        node.run("fsfreeze -u /mnt/nvme")
    heals(node, image)


@pytest.mark.xfail(strict=True, reason=FROZEN)
def test_member_that_hangs_holds_no_job_and_is_used_again_when_it_answers(node: Compute) -> None:
    image = node.warm("hangs")
    with mapped(node, "dmsetup suspend --nolockfs member1", "dmsetup resume member1"):
        node.run("echo 3 >/proc/sys/vm/drop_caches")
        goes_by(node, image)
    heals(node, image)


def test_member_that_fails_costs_a_job_nothing_but_the_hit(node: Compute) -> None:
    image = node.image("fails")
    error = 'dmsetup suspend --nolockfs member1; dmsetup load member1 --table "0 $(blockdev'
    error += ' --getsz /dev/nvme1n1) error"; dmsetup resume member1'
    with mapped(node, error, "true"):
        goes_by(node, image)
        goes_by(node, image)
    node.vm.cut_power()  # an XFS that has met this is mounted anew
    node.boot()
    heals(node, image)


def test_full_disk_costs_a_job_nothing_but_the_hit(node: Compute) -> None:
    image = node.image("full")
    node.run("fallocate -l $(($(df --output=avail -B1 /mnt/nvme | tail -1) - 2000000)) /mnt/nvme/x")
    try:
        goes_by(node, image)
    finally:
        node.run("rm /mnt/nvme/x")
    heals(node, image)


def test_read_only_disk_costs_a_job_nothing_and_serves_no_stale_byte(node: Compute) -> None:
    image = node.warm("read-only")
    other = node.image("other")
    node.run("mount -o remount,ro /mnt/nvme")
    try:
        goes_by(node, image)
        goes_by(node, other)
    finally:
        node.run("mount -o remount,rw /mnt/nvme")
    heals(node, image)


def test_array_that_is_missing_at_boot_costs_a_job_nothing_and_writes_nothing_to_the_root_disk(
    node: Compute,
) -> None:
    node.vm.power_off()
    node.vm.start(without=NVME[1:])
    try:
        node.until("sinfo -h -o %T | grep -qx idle")
        image = node.image("missing")
        goes_by(node, image)
        assert node.run(f"test ! -e {CACHE}; forestage check || true").out.count(
            "cache-not-mounted"
        )
    finally:
        node.vm.cut_power()
        node.boot()
    heals(node, image)
