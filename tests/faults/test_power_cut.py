"""The power goes: what was not on the disk yet is gone, and no job reads a byte of it.

What only the page cache has is thrown away with the mount.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault import MIB, Points, image, kill_stager, shut_down

from boot import Boot
from forestage.commands import sweep
from forestage.events import CopyOutcome
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import mounts
from node import Node, children_left, unmount, until
from through import here


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
        power = Power(node, disk(kind, "320M" if kind == "xfs" else "64M"), boot)
        yield power
        power.back()  # a stager may have cut it, and the node's end reads its cache


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
def test_copy_interrupted_by_a_power_cut_is_no_entry(
    power: Power, points: Points, engine: str, point: str, nth: int
) -> None:
    node = power.node
    node.configure(engine=engine)
    path = node.put("alice/image.sqsh", image())
    points.at(point, power.cut, nth)
    assert node.prolog(1, path).said == ("failed", "io")
    assert node.shows_source(path)
    power.back()
    assert node.entries() == set()
    assert node.prolog(2, path).outcome.result == "copied"
    assert path.read_bytes() == image()


@pytest.mark.cases(2)
@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-the-hook"])
@pytest.mark.parametrize(
    "keys",
    [
        {"engine": "chunks"},
        {"engine": "rsync"},
    ],
    ids=str,
)
def test_published_entry_survives_a_power_cut(
    power: Power, points: Points, keys: dict[str, object], later: bool
) -> None:
    node = power.node
    node.configure(**keys)
    path = node.put("alice/image.sqsh", image())
    if not later:
        points.at("published", power.cut)
    assert node.prolog(1, path).said == (("copied", "") if later else ("failed", "io"))
    if later:
        power.cut()
    assert points.count("published") == 1
    power.back()
    (key,) = node.entries()
    assert node.cache.image_path(key).read_bytes() == image()
    # Nobody knows that yet: it is read first, and without digests copied anew.
    assert node.prolog(2, path).outcome.result == "copied"
    assert path.read_bytes() == image()
    assert node.prolog(3, path).outcome.result == "hit"


def copied(node: Node) -> tuple[int, int]:
    """Bytes of the last copy: those that were here before, and all of them."""
    outcome = node.outcomes("stager")[-1]
    assert isinstance(outcome, CopyOutcome)
    return outcome.resumed, outcome.size


@pytest.mark.cases(2)
@pytest.mark.parametrize("loss", ["nothing", "bytes", "map", "record"])
def test_entry_damaged_by_a_power_cut_is_not_served_and_is_repaired_from_the_source(
    power: Power, loss: str
) -> None:
    node = power.node
    path = node.put("alice/image.sqsh", image())
    key = node.prolog(1, path).outcome.key
    inode = node.cache.image_path(key).stat().st_ino
    power.back()
    lose = {
        "bytes": lambda: overwrite(node.cache.image_path(key), 3 * MIB),
        "map": lambda: overwrite(node.cache.entry_dir(key) / "map", 16),
        "record": lambda: overwrite(node.cache.entry_dir(key) / "entry.json", 0),
    }
    lose.get(loss, lambda: None)()
    assert node.prolog(2, path).outcome.result == "copied"
    assert path.read_bytes() == image()
    size = len(image())
    expected = {"nothing": size, "bytes": size - MIB}.get(loss, 0)
    assert copied(node) == (expected, size)
    assert (node.cache.image_path(key).stat().st_ino == inode) is bool(expected)
    assert node.prolog(3, path).outcome.result == "hit"


def overwrite(file: Path, start: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(bytes(16))


def test_stager_killed_while_verifying_an_entry_of_an_earlier_boot_leaves_no_entry(
    power: Power, points: Points, tmp_path: Path
) -> None:
    node = power.node
    path = node.put("alice/image.sqsh", image())
    key = node.prolog(1, path).outcome.key
    power.back()
    overwrite(node.cache.image_path(key), 3 * MIB)

    def note_and_die() -> None:
        record = node.cache.part_dir(key) / "entry.json"
        (tmp_path / "left").write_text(f"{node.entries()} {record.exists()}")
        kill_stager()

    points.at("claimed", note_and_die, 2)  # the first copy has passed it, too
    assert node.prolog(2, path).outcome.result == "copied"
    assert (tmp_path / "left").read_text() == f"{set()} False", "neither an entry nor its record"
    assert copied(node) == (len(image()) - MIB, len(image()))
    assert path.read_bytes() == image()


def test_entry_of_an_earlier_boot_is_a_hit_after_the_sweep_has_verified_its_bytes(
    power: Power,
) -> None:
    node = power.node
    path = node.put("alice/image.sqsh", image())
    node.prolog(1, path)
    power.back()
    sweep.run_sweep(here(node), SlurmClient("", ""), False, lambda text: None)
    assert node.prolog(2, path).outcome.result == "hit"


def test_evicted_entry_restored_by_a_power_cut_is_whole(power: Power) -> None:
    node = power.node
    path = node.put("alice/image.sqsh", image())
    key = node.prolog(1, path).outcome.key
    node.epilog(1)
    node.cache.evict_entry(key)
    node.cache.delete_evicted()
    power.cut()
    power.back()
    assert all(node.cache.image_path(key).read_bytes() == image() for key in node.entries())
    assert node.prolog(2, path).outcome.result in ("hit", "copied")
    assert path.read_bytes() == image()
