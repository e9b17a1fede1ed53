"""The minute's work while a disk, a source or Slurm hangs: no part waits for another's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far import Far
from fault import image

from forestage.cache.lease import Lease
from forestage.features.prepare.tend import warmed_sign_path
from forestage.paths import NodePaths
from forestage.system import mounts
from node import ALICE, Later, Node, until
from tending import Tended, hangs

EXPORTED = "var/lib/prometheus/node-exporter/forestage.prom"


@pytest.fixture
def tended(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tended]:
    tended = Tended(node.places, tmp_path, monkeypatch)
    yield tended
    tended.wait("sweep", "proofs")


def exported(places: NodePaths) -> Path:
    file = places.root / EXPORTED
    file.parent.mkdir(parents=True)
    return file


def fill(node: Node) -> None:
    """An entry that is to go, as the disk is above its low watermark."""
    node.configure()
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    assert node.epilog(1).said == ("released", "")
    node.configure(low_watermark="1%")
    assert node.entries()


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_tend_leaves_one_room_process_on_a_frozen_disk_and_evicts_after_the_thaw(
    node: Node, tended: Tended, disk: Callable[..., Path], kind: str
) -> None:
    disk(kind, "320M" if kind == "xfs" else "64M")
    file = exported(node.places)
    fill(node)
    subprocess.run(["fsfreeze", "--freeze", node.nvme], check=True)
    try:
        tended.stuck = {"room": hangs}
        first = tended.run()
        assert (first["room"], first["metrics"]) == (("hangs", 0), ("ended", 0))
        assert {first["sweep"][0], first["proofs"][0]} == {"begun"}
        written = file.read_bytes()
        second = tended.run()
        assert (second["room"], second["metrics"]) == (("left out", 0), ("ended", 0))
        assert file.read_bytes() != written, "the metrics are written each minute"
        (pid,) = tended.pids("room")
        assert hangs(pid), "and none beside it"
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", node.nvme], check=True)
    tended.wait("room")
    tended.stuck = {}
    assert tended.run()["room"] == ("ended", 0)
    assert node.entries() == set()


def test_tend_makes_room_while_slurm_does_not_answer(
    node: Node, tended: Tended, tmp_path: Path
) -> None:
    fill(node)
    node.leases.write_lease(Lease(7, ALICE, 0.0, str(node.cache.root)))
    asked, silent = tmp_path / "asked", tmp_path / "silent"
    os.mkfifo(silent)
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n: >{asked}\nread line <{silent}\nexit 1\n")
    squeue.chmod(0o755)
    tended.environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    first = tended.run()
    assert (first["room"], first["sweep"]) == (("ended", 0), ("begun", 0))
    until(asked.exists, "the sweep to ask Slurm")
    fill(node)
    second = tended.run(Later(600))
    assert (second["room"], second["sweep"]) == (("ended", 0), ("left out", 0))
    assert node.entries() == set()
    silent.write_text("\n")
    tended.wait("sweep")
    assert node.leases.list_jobs() == (7,)


def test_tend_makes_room_while_run_is_read_only(node: Node, tended: Tended) -> None:
    fill(node)
    mounts.mount(str(node.places.run), str(node.places.run), mounts.MS_BIND)
    subprocess.run(["mount", "-o", "remount,bind,ro", node.places.run], check=True)
    ends = tended.run()
    assert (ends["room"], ends["sweep"]) == (("ended", 0), ("failed", 0))
    assert node.entries() == set()


def test_hanging_source_blocks_neither_room_nor_later_warm_runs_of_tend(
    node: Node, tended: Tended, far: Far
) -> None:
    """What is left in the source has no lock of the part's."""
    path = far.put("image.sqsh", image())
    fill(node)
    node.configure(low_watermark="1%", warm_at_boot=[str(path)])
    far.hang_reads()
    tended.stuck = {"warm": lambda _: far.calls()["read"]}
    ends = tended.run()
    assert (ends["room"], ends["warm"]) == (("ended", 0), ("cut", 0))
    assert not far.is_left_alone(), "somebody is left there"
    assert tended.is_free("warm")
    assert tended.run()["room"] == ("ended", 0)
    far.behaves()


def test_warm_copy_started_by_tend_holds_no_lock_and_is_marked_once_complete(
    node: Node, tended: Tended
) -> None:
    path = node.put("alice/image.sqsh", image())
    node.configure(warm_at_boot=[str(path)], bandwidth="1MiB", threads=1)
    assert tended.run()["warm"] == ("ended", 1)
    (part,) = node.parts()
    assert not node.is_idle(part.directory.name), "the copy takes seconds"
    assert tended.is_free("warm")
    assert not warmed_sign_path(node.places).exists()
    until(node.entries, "the copy")
    assert tended.run()["warm"] == ("ended", 0)
    assert warmed_sign_path(node.places).exists()
    assert "warm" not in tended.run()
