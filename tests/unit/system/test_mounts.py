"""The kernel's mount table: our binds are told from all other mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.system import mounts
from forestage.system.mounts import Mount, binds_from, holder, listed

TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /lustre rw,relatime - lustre mgs@tcp:/fs rw
31 22 259:1 / /mnt/nvme rw - xfs /dev/nvme0n1 rw
40 30 259:1 /forestage/entries/0a/image /lustre/a\\040b.sqsh ro,nosuid,nodev - xfs /dev/nvme0n1 rw
41 30 259:1 /forestage/evicted/0b.0/image//deleted /lustre/b ro - xfs /dev/nvme0n1 rw
42 30 259:1 /forestage2/entries/0c/image /lustre/c ro - xfs /dev/nvme0n1 rw
43 30 254:0 /forestage/entries/0d/image /lustre/d ro - ext4 /dev/vda rw
"""


def test_table_is_read_as_the_kernel_prints_it() -> None:
    assert listed(TABLE)[3] == Mount(
        40, 30, "259:1", "/forestage/entries/0a/image", "/lustre/a b.sqsh"
    )
    assert len(listed(TABLE)) == 7
    assert listed("") == []


def test_only_binds_of_the_caches_own_file_system_and_folder_are_ours() -> None:
    found = binds_from(listed(TABLE), "/mnt/nvme/forestage")
    assert [(mount.point, inside) for mount, inside in found] == [
        ("/lustre/a b.sqsh", "entries/0a/image"),
        ("/lustre/b", "evicted/0b.0/image//deleted"),
    ]


def test_cache_in_a_subvolume_is_found_by_its_path_inside_the_file_system() -> None:
    table = listed(
        "1 0 0:1 / / rw - ext4 x rw\n"
        "2 1 0:2 /vol /mnt/nvme rw - btrfs x rw\n"
        "3 1 0:2 /vol/forestage/entries/0a/image /a ro - btrfs x rw\n"
        "4 1 0:2 /forestage/entries/0b/image /b ro - btrfs x rw\n"
    )
    assert [m.point for m, _ in binds_from(table, "/mnt/nvme/forestage")] == ["/a"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", 1),
        ("/a", 1),
        ("/mnt", 2),
        ("/mnt/x", 2),
        ("/mntx", 1),
        ("/mnt/nvme", 4),
        ("/mnt/nvme/x", 4),
        ("/mnt/nvme2", 2),
    ],
)
def test_holder_is_the_nearest_mount_and_the_newest_of_equals(path: str, expected: int) -> None:
    table = [
        Mount(1, 0, "0:1", "/", "/"),
        Mount(2, 1, "0:2", "/", "/mnt"),
        Mount(3, 2, "0:3", "/", "/mnt/nvme"),
        Mount(4, 3, "0:4", "/", "/mnt/nvme"),
    ]
    found = holder(table, path)
    assert found is not None
    assert found.id == expected


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


def escaped(text: str) -> str:
    """As the kernel's seq_path does it (fs/proc_namespace.c)."""
    for char in "\\ \t\n#":
        text = text.replace(char, f"\\{ord(char):03o}")
    return text


@given(NAMES, NAMES)
def test_any_name_is_read_back(root: str, point: str) -> None:
    line = f"7 1 0:5 /{escaped(root)} /{escaped(point)} ro - tmpfs tmpfs rw\n"
    assert listed(line * 2) == [Mount(7, 1, "0:5", f"/{root}", f"/{point}")] * 2


def test_open_file_tells_its_mount(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    under = holder(mounts.current(), os.path.realpath(tmp_path))
    assert under is not None
    assert mounts.mount_id(fd) == under.id
    os.close(fd)


def test_mount_that_is_not_the_one_meant_is_left_alone(tmp_path: Path) -> None:
    """The path has become something else: taking that off would hit another's mount."""
    (tmp_path / "link").symlink_to("/proc")
    for point in (tmp_path, tmp_path / "link", Path("/proc")):
        fd = os.open(point, os.O_PATH | os.O_NOFOLLOW)
        mounts.unmount_same(Mount(-1, 0, "0:0", "/", str(point)), fd)
        os.close(fd)
    assert Path("/proc/self").exists()


def test_refused_mount_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        mounts.mount(str(tmp_path / "nothing"), str(tmp_path / "nothing"), mounts.MS_BIND)
    with pytest.raises(OSError, match="nothing"):
        mounts.umount(str(tmp_path / "nothing"))
