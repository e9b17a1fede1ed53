"""Which process stands for a mount namespace."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from forestage.bind import namespaces


@pytest.mark.parametrize("order", [(30, 9, 200), (200, 30, 9), (9, 200, 30)])
def test_mount_namespace_is_listed_once_by_its_lowest_pid(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """A child of another hook's that works in there ends, and a hook would think it gone."""
    for name, inode in [("self", 1), ("5", 1), *((str(pid), 2) for pid in order)]:
        (tmp_path / name / "ns").mkdir(parents=True)
        (tmp_path / name / "ns/mnt").symlink_to(f"mnt:[{inode}]")
    assert namespaces._list_namespaces(tmp_path, None, math.inf) == ([(9, 2)], True)
