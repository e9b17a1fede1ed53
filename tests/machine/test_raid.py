"""A copy is as fast as the drives together: to two as RAID 0, twice as fast as to one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from compute import Compute, Image
from vm import NVME

LIMIT = 4 << 20  # bytes per second of each drive: so little that nothing else is the limit
SIZE = 64  # MiB
ONE = """\
until umount /mnt/nvme; do sleep 1; done
mdadm --stop /dev/md/nvme
mdadm --zero-superblock /dev/nvme0n1 /dev/nvme1n1
mkfs.xfs -q -f -L nvme /dev/nvme0n1
mount -o prjquota /dev/nvme0n1 /mnt/nvme
"""
RIVAL = """\
sync
begin=$(date +%s%N)
cp {path} /mnt/nvme/rival
sync /mnt/nvme/rival
end=$(date +%s%N)
rm /mnt/nvme/rival
sync
echo $(((end - begin) / 1000))
"""


@pytest.fixture
def throttled(booted: Compute) -> Iterator[Compute]:
    """Its drives write no faster than LIMIT. It is off in the end: the next test boots it anew."""
    booted.ready()
    for name in NVME:
        booted.vm.monitor(f"block_set_io_throttle {name} 0 0 {LIMIT} 0 0 0")
    yield booted
    booted.vm.cut_power()


def ours(node: Compute, image: Image) -> float:
    """Seconds of one copy, of a source that the node's memory has."""
    node.run("forestage evict --all >/dev/null; sync -f /mnt/nvme", check=False)
    node.run(f"cat {image.path} >/dev/null")
    said = node.run(f"forestage stage --user alice --json {image.path}").out
    (copy,) = json.loads(said)["images"]
    assert copy["result"] == "copied"
    return float(copy["wait"])


def rival(node: Compute, image: Image) -> float:
    """The same by cp, until it is on the disk."""
    return int(node.run(RIVAL.format(path=image.path)).out) / 1e6


def test_copy_to_a_raid_of_two_drives_is_faster_than_to_a_single_drive(throttled: Compute) -> None:
    image = throttled.image("copied", mib=SIZE)
    ours_two, cp_two = ours(throttled, image), rival(throttled, image)
    throttled.run(ONE)
    ours_one, cp_one = ours(throttled, image), rival(throttled, image)
    best = SIZE * (1 << 20) / LIMIT  # seconds of one drive
    print(f"\nours {ours_one / ours_two:.2f} times as fast ({best / ours_one:.2f} of one drive)")
    print(f"cp {cp_one / cp_two:.2f} times as fast ({best / cp_one:.2f} of one drive)")
    assert ours_one / ours_two > 1.6
