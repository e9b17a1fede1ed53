"""Loop devices: one for each file, and nobody's but ours is let go of."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from forestage.errors import Failed
from forestage.system import loop
from forestage.system.loop import LoopDevice


def test_loop_device_of_another_program_is_not_listed(tmp_path: Path) -> None:
    file = tmp_path / "container.sif"
    file.write_bytes(bytes(8192))
    argv = ["losetup", "--find", "--show", file]
    name = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    try:
        assert name not in [one.name for one in loop.list_attached_devices()]
    finally:
        subprocess.run(["losetup", "--detach", name], check=True)


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        ("/mnt/nvme/cache/entries/k/image", True),
        ("/mnt/nvme/cache/evicted/k/image (deleted)", True),
        ("/cache/entries/k/image", True),  # of a volume that was mounted at /mnt/nvme
        ("/entries/k/image", True),  # … at the cache itself
        ("/mnt/other/entries/k/image", False),
        ("/e/entries/k/image", False),  # no whole name of the path
        ("/mnt/nvme/cache/image", False),
    ],
)
def test_loop_device_file_belongs_to_the_cache_also_by_the_path_of_an_unmounted_volume(
    file: str, ours: bool
) -> None:
    assert LoopDevice("/dev/loop0", file, 1, 2).is_below_cache("/mnt/nvme/cache") == ours


def test_attaching_a_file_without_loop_control_fails_with_reason_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "image"
    file.write_bytes(bytes(8192))
    monkeypatch.setattr(loop, "CONTROL", tmp_path / "loop-control")
    with pytest.raises(Failed) as raised:
        loop.attach_file(file, read_only=True)
    assert raised.value.reason == "loop"
    assert "loop-control" in str(raised.value)


def test_loop_device_node_missing_in_a_containers_dev_is_created(
    private_mounts: None, tmp_path: Path
) -> None:
    """It has the devices that were there when the container began."""
    control = Path("/dev/loop-control").stat().st_rdev
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev"], check=True)
    os.mknod("/dev/loop-control", stat.S_IFCHR | 0o600, control)
    file = tmp_path / "image"
    file.write_bytes(bytes(8192))
    name = loop.attach_file(file, read_only=True)
    Path(name).unlink()
    try:
        (one,) = [one for one in loop.list_attached_devices() if one.is_backed_by(file.stat())]
        assert one.name == name
    finally:
        loop.detach_device(one)
