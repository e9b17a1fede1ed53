"""The power goes: what was not on the disk yet is gone, and no job reads a byte of it.

What only the page cache has is thrown away with the mount.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault import Points, image, shut_down

from boot import Boot
from forestage.system import mounts
from node import Node, children_left, unmount, until


class Power:
    """A node whose NVMe is a real file system in a file."""

    def __init__(self, node: Node, disk: Path, boot: Boot) -> None:
        self.node = node
        self._disk = disk
        self._boot = boot

    def cut(self) -> None:
        """Nothing that is not there yet reaches the disk any more."""
        shut_down(self.node.nvme)

    def back(self) -> None:
        """The node starts: mounts, processes and /run are gone, the disk is what it is."""
        node = self.node
        for path in node.binds():
            mounts.umount(path)
        # One that lingers keeps the mounts of its own namespace, and with them this file system.
        until(lambda: not children_left(), "all processes to end")
        unmount(node.nvme)
        shutil.rmtree(node.places.run, ignore_errors=True)
        subprocess.run(["mount", "-o", "loop", self._disk, node.nvme], check=True)
        self._boot.again()


@pytest.fixture(params=["ext4", "xfs"])
def power(
    node: Node, disk: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Power]:
    kind = str(request.param)
    with Boot.told_by(tmp_path / "boot_id") as boot:
        yield Power(node, disk(kind, "320M" if kind == "xfs" else "64M"), boot)


@pytest.mark.parametrize(
    ("engine", "point", "nth"),
    [
        ("chunks", "chunk", 1),
        ("chunks", "chunk", 5),
        ("chunks", "copied", 1),
        ("chunks", "checked", 1),
        ("rsync", "copied", 1),
        ("rsync", "checked", 1),
    ],
)
def test_copy_that_the_power_cut_short_is_no_entry(
    power: Power, points: Points, engine: str, point: str, nth: int
) -> None:
    node = power.node
    node.configure(engine=engine)
    path = node.put("alice/image.sqsh", image())
    points.at(point, power.cut, nth)
    assert node.prolog(1, path).code == 0
    assert node.shows_source(path)
    power.back()
    assert node.entries() == set()
    assert node.prolog(2, path).outcome.result == "copied"
    assert path.read_bytes() == image()


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-the-hook"])
@pytest.mark.parametrize(
    "keys",
    [
        {"engine": "chunks"},
        {"engine": "chunks", "direct": "off"},
        # Without digests nobody reads the copy, which would write it out first.
        {"engine": "rsync", "digest": False},
    ],
    ids=str,
)
def test_what_is_published_stays_through_a_power_cut(
    power: Power, points: Points, keys: dict[str, object], later: bool
) -> None:
    node = power.node
    node.configure(**keys)
    path = node.put("alice/image.sqsh", image())
    if not later:
        points.at("published", power.cut)
    assert node.prolog(1, path).code == 0
    if later:
        power.cut()
    assert points.count("published") == 1
    power.back()
    assert node.prolog(2, path).outcome.result == "hit"
    assert path.read_bytes() == image()


def test_what_a_power_cut_brings_back_of_the_evicted_is_whole(power: Power) -> None:
    node = power.node
    path = node.put("alice/image.sqsh", image())
    key = node.prolog(1, path).outcome.key
    node.epilog(1)
    node.cache.evict(key)
    node.cache.delete_evicted()
    power.cut()
    power.back()
    assert all(node.cache.image(key).read_bytes() == image() for key in node.entries())
    assert node.prolog(2, path).outcome.result in ("hit", "copied")
    assert path.read_bytes() == image()
