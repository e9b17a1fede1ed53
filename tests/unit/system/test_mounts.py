"""The kernel's mount table: our binds are told from all other mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.system import mounts
from forestage.system.mounts import (
    MountInfo,
    find_covering_fuse,
    find_mount_of_path,
    find_user_fuse,
    list_binds_of_directory,
    parse_mountinfo,
)

TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /lustre rw,relatime - lustre mgs@tcp:/fs rw
31 22 259:1 / /mnt/nvme rw - xfs /dev/nvme0n1 rw
40 30 259:1 /forestage/entries/0a/image /lustre/a\\040b.sqsh ro,nosuid,nodev - xfs /dev/nvme0n1 rw
41 30 259:1 /forestage/evicted/0b.0/image//deleted /lustre/b ro - xfs /dev/nvme0n1 rw
42 30 259:1 /forestage2/entries/0c/image /lustre/c ro - xfs /dev/nvme0n1 rw
43 30 254:0 /forestage/entries/0d/image /lustre/d ro - ext4 /dev/vda rw
"""


def of_user(uid: int) -> str:
    """What mountinfo says behind the mount point of a user's FUSE."""
    return f"rw,nosuid - fuse.sshfs host:/x rw,user_id={uid},group_id=0"


def test_mount_table_is_parsed_as_the_kernel_prints_the_lines() -> None:
    assert parse_mountinfo(TABLE)[3] == MountInfo(
        *(40, 30, "259:1", "/forestage/entries/0a/image", "/lustre/a b.sqsh"),
        "ro,nosuid,nodev - xfs /dev/nvme0n1 rw",
    )
    assert len(parse_mountinfo(TABLE)) == 7
    assert parse_mountinfo("") == []


def test_binds_of_a_directory_are_found_by_file_system_and_path_inside() -> None:
    found = list_binds_of_directory(parse_mountinfo(TABLE), "/mnt/nvme/forestage")
    assert [(mount.point, inside) for mount, inside in found] == [
        ("/lustre/a b.sqsh", "entries/0a/image"),
        ("/lustre/b", "evicted/0b.0/image//deleted"),
    ]


@pytest.mark.parametrize(
    ("rest", "user"),
    [
        ("- fuse.sshfs host:/x rw,user_id=1000,group_id=1000", 1000),
        ("shared:5 master:7 - fuse none rw,user_id=7,group_id=0,allow_other", 7),
        ("- fuse.x user_id=9 rw,user_id=0,group_id=0", 0),
        ("- fuse rw,user_id=9 rw,user_id=8,group_id=0", 8),
        ("- fusectl none rw", 0),
        ("- tmpfs fuse rw,user_id=5", 0),
    ],
)
def test_user_of_a_fuse_mount_is_read_from_the_kernels_options_only(rest: str, user: int) -> None:
    """Type and source are words of that user."""
    (found,) = parse_mountinfo(f"7 1 0:5 / /x rw,nosuid,nodev {rest}\n")
    assert found.fuse_owner_uid == user


@pytest.mark.parametrize(
    ("point", "parent", "user", "covers"),
    [
        ("/lustre/a", 2, 1000, True),
        ("/lustre/a/b", 2, 1000, True),
        ("/lustre/a/b/img", 2, 1000, True),  # never so: the newer one's parent is the older
        ("/lustre/a/b/img", 3, 1000, True),
        ("/lustre", 2, 1000, True),
        ("/lustre", 1, 1000, True),
        ("/lustre/a", 2, 0, False),  # root's
        ("/lustre/a/b/im", 2, 1000, False),
        ("/lustre/c", 2, 1000, False),
        ("/lustre/a", 9, 1000, False),  # itself beneath another mount
    ],
)
def test_users_fuse_mount_above_a_redirect_covers_the_redirect(
    point: str, parent: int, user: int, covers: bool
) -> None:
    bind = MountInfo(3, 2, "259:1", "/forestage/entries/0a/image", "/lustre/a/b/img")
    table = [
        MountInfo(1, 0, "254:0", "/", "/"),
        MountInfo(2, 1, "0:40", "/", "/lustre"),
        bind,
        MountInfo(5, 2, "0:41", "/", "/lustre/other", of_user(1000)),
        MountInfo(4, parent, "0:42", "/", point, of_user(user)),
    ]
    found = find_covering_fuse(table, bind)
    assert (found is not None and found.id == 4) == covers


def test_redirect_on_top_of_a_users_fuse_mount_is_not_covered() -> None:
    bind = MountInfo(3, 2, "259:1", "/forestage/entries/0a/image", "/lustre/a/img")
    table = [
        MountInfo(1, 0, "0:1", "/", "/"),
        MountInfo(2, 1, "0:2", "/", "/lustre/a", of_user(1000)),
        bind,
    ]
    assert find_covering_fuse(table, bind) is None


def test_outermost_covering_fuse_mount_is_found_first() -> None:
    bind = MountInfo(3, 2, "259:1", "/forestage/entries/0a/image", "/lustre/a/b/img")
    inner, outer = (
        MountInfo(n, 2, "0:4", "/", at, of_user(7))
        for n, at in ((5, "/lustre/a/b"), (6, "/lustre/a"))
    )
    table = [
        MountInfo(1, 0, "0:1", "/", "/"),
        MountInfo(2, 1, "0:2", "/", "/lustre"),
        bind,
        inner,
        outer,
    ]
    assert find_covering_fuse(table, bind) == outer


def test_cache_in_a_subvolume_is_found_by_its_path_inside_the_file_system() -> None:
    table = parse_mountinfo(
        "1 0 0:1 / / rw - ext4 x rw\n"
        "2 1 0:2 /vol /mnt/nvme rw - btrfs x rw\n"
        "3 1 0:2 /vol/forestage/entries/0a/image /a ro - btrfs x rw\n"
        "4 1 0:2 /forestage/entries/0b/image /b ro - btrfs x rw\n"
    )
    assert [m.point for m, _ in list_binds_of_directory(table, "/mnt/nvme/forestage")] == ["/a"]


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
def test_mount_of_a_path_is_the_nearest_and_newest(path: str, expected: int) -> None:
    table = [
        MountInfo(1, 0, "0:1", "/", "/"),
        MountInfo(2, 1, "0:2", "/", "/mnt"),
        MountInfo(3, 2, "0:3", "/", "/mnt/nvme"),
        MountInfo(4, 3, "0:4", "/", "/mnt/nvme"),
    ]
    found = find_mount_of_path(table, path)
    assert found is not None
    assert found.id == expected


USERS = {
    1: MountInfo(1, 0, "0:1", "/", "/", "rw - ext4 /dev/vda rw"),
    2: MountInfo(2, 1, "0:2", "/", "/a", of_user(1000)),
    3: MountInfo(3, 2, "0:3", "/", "/a/b", "rw - tmpfs none rw"),
    4: MountInfo(4, 1, "0:4", "/", "/c", of_user(0)),
    5: MountInfo(5, 5, "0:5", "/", "/", of_user(7)),  # its own parent, as the first of a namespace
}


@pytest.mark.parametrize(
    ("number", "services", "found"),
    [
        (1, {}, None),
        (2, {}, 2),
        (3, {}, 2),  # root's, on a user's
        (4, {}, None),
        (5, {}, 5),
        (9, {}, None),
        (3, {"/a": "fuse.sshfs 1000"}, None),
        (2, {"/a": "fuse.sshfs 1001"}, 2),
        (2, {"/a": "fuse 1000"}, 2),
        (2, {"/a/b": "fuse.sshfs 1000"}, 2),
        (2, {"/": "fuse.sshfs 1000"}, 2),
    ],
)
def test_users_fuse_mount_is_found_among_all_parents_of_a_mount(
    number: int, services: dict[str, str], found: int | None
) -> None:
    assert find_user_fuse(list(USERS.values()), number, services) == USERS.get(found or 0)


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


def escaped(text: str) -> str:
    """As the kernel's seq_path does it (fs/proc_namespace.c)."""
    for char in "\\ \t\n#":
        text = text.replace(char, f"\\{ord(char):03o}")
    return text


@given(NAMES, NAMES)
def test_any_path_in_the_mount_table_is_read_back(root: str, point: str) -> None:
    line = f"7 1 0:5 /{escaped(root)} /{escaped(point)} ro - tmpfs tmpfs rw\n"
    assert (
        parse_mountinfo(line * 2)
        == [MountInfo(7, 1, "0:5", f"/{root}", f"/{point}", "ro - tmpfs tmpfs rw")] * 2
    )


def test_mount_id_of_an_open_file_is_that_of_its_mount(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    under = find_mount_of_path(mounts.list_mounts(), os.path.realpath(tmp_path))
    assert under is not None
    assert mounts.read_mount_id(fd) == under.id
    os.close(fd)


def test_unmount_if_same_leaves_another_mount_at_the_path(tmp_path: Path) -> None:
    """The path has become something else: taking that off would hit another's mount."""
    (tmp_path / "link").symlink_to("/proc")
    for point in (tmp_path, tmp_path / "link", Path("/proc")):
        fd = os.open(point, os.O_PATH | os.O_NOFOLLOW)
        mounts.unmount_if_same(MountInfo(-1, 0, "0:0", "/", str(point)), fd)
        os.close(fd)
    assert Path("/proc/self").exists()


def test_failed_mount_or_unmount_raises_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        mounts.mount(str(tmp_path / "nothing"), str(tmp_path / "nothing"), mounts.MS_BIND)
    with pytest.raises(OSError, match="nothing"):
        mounts.umount(str(tmp_path / "nothing"))


def test_hidden_path_below_a_mount_is_found_on_the_same_mount_if_possible() -> None:
    whole = mounts.MountInfo(1, 0, "8:1", "/", "/root-only/all")
    part = mounts.MountInfo(2, 0, "8:1", "/pub", "/pub")
    hides = mounts.MountInfo(9, 2, "9:9", "/entry", "/pub/i.sqsh")
    assert mounts.find_hidden_path([whole, part], [part, hides], hides) == "/pub/i.sqsh"
    assert mounts.find_hidden_path([whole], [part, hides], hides) == "/root-only/all/pub/i.sqsh"
    assert mounts.find_hidden_path([], [part, hides], hides) == ""


@pytest.mark.parametrize("directory", ["/nvme/cache", "/nvme/odd\\ name\t\n"])
def test_mountinfo_marker_matches_a_redirects_line_but_no_users_mount(directory: str) -> None:
    def line(root: str, point: str, source: str = "x", device: str = "8:1") -> str:
        for sign in "\\ \t\n":
            root, point = (one.replace(sign, f"\\{ord(sign):03o}") for one in (root, point))
        return f"9 1 {device} {root} {point} rw - ext4 {source} rw"

    mark = mounts.format_mountinfo_marker(mounts.BindOrigin("8:1", f"{directory}/"))
    assert mark in line(f"{directory}/entries/0a/image", "/lustre/a").encode()
    for other in (
        line("/", f"/tmp{directory}/x"),
        line("/", f"/tmp/ 8:1 {directory}/x"),
        line("/", "/tmp/x", source="8:1"),
        line(f"{directory}/entries/0a/image", "/lustre/a", device="8:17"),
        line(f"{directory}2/x", "/lustre/a"),
    ):
        assert mark not in other.encode()


@pytest.mark.parametrize(
    ("rest", "server"),
    [
        ("rw,relatime shared:1 - nfs4 files:/export rw,vers=4.1,proto=tcp", True),
        ("rw,relatime shared:1 - nfs files:/export rw,vers=3,proto=tcp", True),
        ("rw,relatime shared:1 - nfs4 files:/export rw,vers=4.2,proto=tcp", False),
        ("rw,relatime - lustre mgs:/fs rw,flock", False),
        ("rw,relatime - ext4 /dev/vda rw", False),
    ],
)
def test_has_server_times_is_true_for_nfs_without_delegated_times(rest: str, server: bool) -> None:
    assert MountInfo(1, 0, "0:1", "/", "/mnt", rest).has_server_times is server
