"""Where a job may mount, and in what order the companion is told to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.errors import Declined
from forestage.features.data import data_view
from forestage.features.data.squashfs_mount import SYSTEM, JobMountPoint, check_mount_allowed

NEEDED = ("/home/alice", "/lustre/project/run", "/mnt/nvme/forestage")


@pytest.mark.parametrize(
    "path",
    [
        "/mnt/point",
        "/home/alice/venv",
        "/home/bob",
        "/home/alicette",
        "/lustre/project/data",
        "/lustre/project/run/below",
        "/mnt/nvme/alice",
        "/data",
        "/opt/env",
        "/tmp/x",
        "/var/scratch/alice",
        "/etcetera",
        "/usr2",
        "/home/alice/ä b",
    ],
)
def test_mount_point_beside_needed_directories_is_allowed(path: str) -> None:
    check_mount_allowed(path, NEEDED)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/", "nothing may be mounted over /bin"),
        ("/etc", "over /etc"),
        ("/etc/sudoers.d", "over /etc"),
        ("/usr/local/env", "over /usr"),
        ("/lib64", "over /lib64"),
        ("/var", "over /var/cache"),
        ("/var/spool/slurmd/x", "over /var/spool"),
        ("/run/forestage/leases", "over /run"),
        ("/proc/self", "over /proc"),
        ("/sys/fs", "over /sys"),
        ("/dev/shm/x", "over /dev"),
        ("/home", "would hide /home/alice"),
        ("/home/alice", "would hide /home/alice"),
        ("/lustre", "would hide /lustre/project/run"),
        ("/mnt", "would hide /mnt/nvme/forestage"),
        ("/mnt/nvme/forestage", "would hide /mnt/nvme/forestage"),
        ("relative", "no absolute path"),
        ("", "no absolute path"),
        ("/a\tb", "no absolute path"),
        ("/a\nb", "no absolute path"),
        ("/a\udcff", "not UTF-8"),
    ],
)
def test_mount_point_that_a_step_or_the_system_needs_is_declined(path: str, why: str) -> None:
    with pytest.raises(Declined, match=why) as raised:
        check_mount_allowed(path, NEEDED)
    assert raised.value.reason == "no-mount"


@given(st.lists(st.sampled_from(["etc", "usr", "var", "lib", "spool", "home", "a"]), max_size=4))
def test_allowed_mount_point_is_neither_above_nor_below_a_system_directory(
    parts: list[str],
) -> None:
    path = "/" + "/".join(parts)
    try:
        check_mount_allowed(path, ())
    except Declined:
        return
    for directory in SYSTEM:
        assert not f"{path}/".startswith(f"{directory}/")
        assert not f"{directory}/".startswith(f"{path}/")


def test_existing_mount_point_gives_a_served_line_and_a_missing_point_a_folder_line_too() -> None:
    assert JobMountPoint("/home/a/x", 5).format_lines("/run/s") == [
        ("served", "/run/s", "/home/a/x", "5")
    ]
    assert JobMountPoint("/data/x/y", 0, "/data").format_lines("/run/s") == [
        ("folder", "x/y", "/data", "root"),
        ("served", "/run/s", "/data/x/y", "root"),
    ]


def test_mount_lines_are_sorted_by_the_depth_of_their_targets() -> None:
    lines = [
        ("served", "/s", "/data/x/y", "root"),
        ("device", "/dev/loop1", "ext4", "ro", "/home/a", "7"),
        ("folder", "x/y", "/data", "root"),
        ("env", "A", "/a/very/long/value/indeed"),
        ("served", "/s", "/home/a/x", "5"),
    ]
    ordered = data_view.sort_by_depth(lines)
    assert sorted(ordered) == sorted(lines)
    assert [line[-2] for line in ordered[1:]] == ["/data", "/home/a", "/data/x/y", "/home/a/x"]
    assert ordered[0][0] == "env"
