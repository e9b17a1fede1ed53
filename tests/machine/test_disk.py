"""The cache's disk freezes, or a member of its RAID: jobs do not notice, and it heals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from compute import OFF, Compute, Image, command

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


def goes_by(node: Compute, image: Image) -> tuple[str, str]:
    """A whole job, its Epilog as well, while the disk is as it is: what it got, and why."""
    script = command(f"stage={image.path}", f"{image.look}; echo $SLURM_JOB_ID")
    done = node.begin(script, user="alice").wait(HUNG)
    assert image.seen(done)
    node.idle(HUNG)
    job = int(done.out.split()[-1])
    last = [one.outcome for one in node.outcomes(job) if one.hook in ("prolog", "step")][-1]
    return last.result, last.reason


def heals(node: Compute, image: Image) -> None:
    """The next jobs find the image in the cache again, and nothing is left of what went before."""
    node.run("systemctl start forestage-sweep")
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


def test_disk_frozen_while_a_job_runs_holds_no_epilog(node: Compute) -> None:
    image = node.warm("running")
    with node.holding(f"stage={image.path}", "true", image.look) as running, frozen(node):
        node.run(f"touch {OFF}")
        assert image.seen(running.wait(HUNG))
        node.idle(HUNG)
    heals(node, image)


def test_disk_frozen_while_a_step_reads_through_holds_neither_it_nor_its_epilog(
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


@pytest.mark.parametrize("member", ["member0", "member1"])
def test_member_that_hangs_holds_no_job_and_is_used_again_when_it_answers(
    node: Compute, member: str
) -> None:
    """Whichever has the file that the probe reads."""
    image = node.warm("hangs")
    node.run(MAPPED)
    node.run(f"dmsetup suspend --nolockfs {member}")
    try:
        node.run("echo 3 >/proc/sys/vm/drop_caches")
        assert goes_by(node, image)[1] == "cache-hangs"
    finally:
        node.run(f"dmsetup resume {member}")
    heals(node, image)
