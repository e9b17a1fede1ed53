"""Things that go wrong while a copy is under way, each with the real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

# These lie beside this file, not in a package.
from far import Far  # noqa: E402
from fault import Gate, Points, image  # noqa: E402

from forestage import trace  # noqa: E402
from forestage.views.through import keeper  # noqa: E402
from node import Node  # noqa: E402
from through import SIZE, Shown, Through  # noqa: E402


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Points:
    points = Points(tmp_path / "points")
    monkeypatch.setattr(trace, "listener", points)
    return points


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture
def far(node: Node, farfs: Path, tmp_path: Path) -> Iterator[Far]:
    far = Far(farfs, node, tmp_path / "far")
    yield far
    far.end()


@pytest.fixture
def disk(node: Node, tmp_path: Path) -> Callable[..., Path]:
    """Makes the node's NVMe a small disk with a real file system of the wanted type; its file."""

    def format_disk(kind: str, size: str = "64M") -> Path:
        file = tmp_path / "disk"
        subprocess.run(["truncate", "-s", size, file], check=True)
        subprocess.run([f"mkfs.{kind}", "-q", file], check=True)
        # The loop device goes with its mount, and that with the test's namespace.
        subprocess.run(["mount", "-o", "loop", file, node.nvme], check=True)
        return file

    return format_disk


@pytest.fixture
def shown(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """Has images read through; the file lies over the image's own path, or over a place `at`."""
    monkeypatch.setattr(keeper, "START", 600.0)  # a machine may stand still
    made: list[Through] = []

    def show(path: Path | None = None, at: Path | None = None, lay: bool = True) -> Through:
        made.append(Through(node, path or node.put("alice/image.sqsh", image(7, SIZE)), at))
        if lay:
            made[-1].lay()
        return made[-1]

    yield show
    for one in made:
        one.close()
