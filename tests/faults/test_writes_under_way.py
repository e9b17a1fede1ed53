"""A write that began before a copy, and whose bytes come when they like, is in no entry's way.

The file's times are those of the write's beginning: by these it is, once the bytes have come, still
the very file that was copied.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from far import Far
from fault import MIB, Points
from fault import image as content
from parked import BLOCK, Parked

from forestage.cache.source_image import identity_from_stat
from forestage.features.data import data_view, retry
from node import ALICE, Node, until

OFFSET = 40 * BLOCK
SIZES = {"ext4": "32M", "xfs": "300M"}  # the smallest of xfs
KINDS = ("tmpfs", "ext4", "xfs")
POINTS = ("before", "claimed", "reserved", "chunk", "copied", "checked", "published")


# Where a file's holes are, tmpfs tells nobody while it is written: a stager would wait.
MOMENTS = [(k, at) for k in KINDS for at in POINTS if (k, at) != ("tmpfs", "reserved")]


@pytest.fixture(params=KINDS)
def place(node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of alice's, on a local file system of this type."""
    made = node.shared / "place"
    made.mkdir()
    if request.param != "tmpfs":
        disk = tmp_path / "source"
        subprocess.run(["truncate", "-s", SIZES[request.param], disk], check=True)
        subprocess.run([f"mkfs.{request.param}", "-q", disk], check=True)
        subprocess.run(["mount", "-o", "loop", disk, made], check=True)
    os.chown(made, ALICE.uid, ALICE.gid)
    node.configure(redirect="none")
    return made


@pytest.fixture
def parked(far: Far) -> Iterator[Parked]:
    made = Parked(far, image(2)[OFFSET:])
    yield made
    made.land()


def image(seed: int = 1) -> bytes:
    return content(seed, 3 * MIB - 4321)


def put(path: Path, data: bytes) -> Path:
    """A file that can be read while it is written past the page cache.

    Of a new one ext4 has neither blocks nor a note that it has no set-id bits to take away.
    """
    for mode in ("wb", "r+b"):
        with path.open(mode) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    os.chown(path, ALICE.uid, ALICE.gid)
    return path


def right() -> bytes:
    """The image once the parked write has landed."""
    return image()[:OFFSET] + image(2)[OFFSET : OFFSET + BLOCK] + image()[OFFSET + BLOCK :]


def is_right(node: Node, path: Path) -> bool:
    """Whether the cache has no entry of this very file, or one with its bytes."""
    key = key_of(path)
    return key not in node.entries() or node.cache.image_path(key).read_bytes() == path.read_bytes()


def key_of(path: Path) -> str:
    return identity_from_stat(path.stat(), str(path)).key


@pytest.mark.cases(2)
def test_image_being_written_is_declined_and_copied_after_the_write_has_ended(
    node: Node, place: Path, parked: Parked, points: Points
) -> None:
    path = put(place / "image.sqsh", image())
    parked.begin(path, OFFSET)
    key = key_of(path)

    assert node.prolog(1, path).said == ("declined", "written")
    assert (node.entries(), node.parts(), points.count("reserved")) == (set(), [], 0)

    parked.land()
    assert key_of(path) == key  # whoever had copied it would not know
    assert node.prolog(2, path).said == ("copied", "")
    assert node.cache.image_path(key).read_bytes() == path.read_bytes() == right()


@pytest.mark.cases(2)
@pytest.mark.parametrize(("place", "begins"), MOMENTS, indirect=["place"])
def test_write_at_any_point_of_a_copy_leaves_no_entry_with_wrong_bytes(
    node: Node, place: Path, parked: Parked, points: Points, begins: str
) -> None:
    """All points are after the first look at the file: each of its entries is the right one."""
    later = POINTS[POINTS.index(begins) + 1 :]
    for number, lands in enumerate((*later, "after")):
        path = put(place / f"{number}.sqsh", image())
        if begins == "before":
            parked.begin(path, OFFSET)
        else:
            points.at(begins, lambda at=path: parked.begin(at, OFFSET), points.count(begins) + 1)
        points.at(lands, parked.land, points.count(lands) + 1)
        ran = node.prolog(number + 1, path)
        assert ran.code == 0
        points.calm()
        parked.land()
        until(lambda at=path: at.read_bytes() == right(), "the write to land")
        assert is_right(node, path), lands
        path.unlink()


def test_directory_being_written_is_declined_and_copied_after_the_write_has_ended(
    node: Node, place: Path, parked: Parked, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.configure(redirect="spank")
    monkeypatch.setattr(retry, "AGAIN", 0.0)
    folder = place / "set"
    folder.mkdir()
    for number in range(5):
        put(folder / f"{number}", bytes([number]) * 70_000)
    path = put(folder / "weights", image())
    parked.begin(path, OFFSET)
    assert staged(node, folder, 1) == ("declined", "written")
    assert (node.entries(), node.parts()) == (set(), [])

    parked.land()
    assert staged(node, folder, 2) == ("ready", "")
    (key,) = node.entries()
    assert right() in node.cache.image_path(key).read_bytes()


def staged(node: Node, path: Path, job: int) -> tuple[str, str]:
    """How a directory stands once its process has ended."""
    node.prolog(job, comment=f"stage={path}/")

    def found() -> tuple[str, str] | None:
        one = data_view.read_job_data(node.leases, job).trees.get(f"{path}/")
        return (one.state, one.reason) if one and one.state in ("ready", "declined") else None

    return until(found, "the tree")  # type: ignore[return-value]
