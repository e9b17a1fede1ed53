"""The kind of a file system, and whose word on holes is the kernel's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from forestage.system import file_systems


def test_file_system_type_is_the_kernels_magic_number() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert file_systems.read_file_system_type(fd) == 0x9FA0
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_systems.read_file_system_type(-1)


@pytest.mark.parametrize(
    ("kind", "true"),
    [
        (0xEF53, True),  # ext4
        (0x58465342, True),  # XFS
        (0x9123683E, True),  # btrfs
        (0x01021994, True),  # tmpfs
        (0x794C7630, False),  # overlayfs
        (0x65735546, False),  # FUSE
        (0x6969, False),  # NFS
        (0xFF534D42, False),  # CIFS
        (0x2FC12FC1, False),  # ZFS
        (0x0BD00BD0, False),  # Lustre
        (0x47504653, False),  # GPFS
        (0x00C36400, False),  # CephFS
        (0x0, False),
    ],
)
def test_hole_map_is_trusted_on_local_file_systems_only(
    monkeypatch: pytest.MonkeyPatch, kind: int, true: bool
) -> None:
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda _: kind)
    assert file_systems.is_hole_map_true(0) is true


@pytest.mark.parametrize(
    ("kind", "true"),
    [
        (0xEF53, True),  # ext4
        (0x58465342, True),  # XFS
        (0x9123683E, True),  # btrfs
        (0x01021994, True),  # tmpfs
        (0x6969, True),  # NFS
        (0x794C7630, False),  # overlayfs
        (0x65735546, False),  # FUSE
        (0xFF534D42, False),  # CIFS
        (0x0BD00BD0, False),  # Lustre
        (0x0, False),
    ],
)
def test_inode_numbers_are_trusted_on_local_and_nfs_file_systems(
    monkeypatch: pytest.MonkeyPatch, kind: int, true: bool
) -> None:
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda _: kind)
    assert file_systems.is_inode_number_true(0) is true


def test_file_system_of_unknown_type_is_not_trusted_for_holes_and_inodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: int) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(file_systems, "read_file_system_type", fail)
    assert not file_systems.is_hole_map_true(0)
    assert not file_systems.is_inode_number_true(0)


def test_file_counts_as_sparse_if_a_page_or_more_is_unallocated(tmp_path: Path) -> None:
    for size, blocks, lacks in (
        (8192, 16, False),
        (8192, 9, False),
        (8192, 8, True),
        (0, 0, False),
    ):
        assert file_systems.is_probably_sparse(size, blocks) is lacks
