"""The engines: exactly the source's bytes in the part, or an error that says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage import run
from forestage.copy import ENGINES, Engine
from forestage.errors import Failed

TIMEOUT = 30.0
SIZES = [1, 4095, 4096, 4097, 1 << 20, (5 << 20) + 7]


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def part_of(tmp_path: Path, size: int) -> Path:
    part = tmp_path / "image"
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.posix_fallocate(fd, 0, size)
    os.close(fd)
    return part


@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_cross(tmp_path: Path, engine: Engine, source: int, size: int) -> None:
    data = os.urandom(size)
    os.write(source, data)
    part = part_of(tmp_path, size)
    engine.copy(source, part, TIMEOUT)
    assert part.read_bytes() == data


def test_holes_and_zeros_are_bytes_too(tmp_path: Path, engine: Engine, source: int) -> None:
    os.pwrite(source, b"start", 0)
    os.pwrite(source, b"end", 3 << 20)
    size = (3 << 20) + 3
    part = part_of(tmp_path, size)
    # A leftover of an earlier use of these blocks must not show through a hole.
    part.write_bytes(b"\xff" * size)
    engine.copy(source, part, TIMEOUT)
    assert part.read_bytes() == b"start" + bytes((3 << 20) - 5) + b"end"


def test_a_part_of_the_right_size_and_time_is_copied_all_the_same(
    tmp_path: Path, engine: Engine, source: int
) -> None:
    os.write(source, b"right")
    part = part_of(tmp_path, 5)
    part.write_bytes(b"wrong")
    facts = os.fstat(source)
    os.utime(part, ns=(facts.st_mtime_ns, facts.st_mtime_ns))
    engine.copy(source, part, TIMEOUT)
    assert part.read_bytes() == b"right"


def test_the_open_file_is_copied_whatever_its_name_has_become(
    tmp_path: Path, engine: Engine, source: int
) -> None:
    os.write(source, b"right")
    (tmp_path / "source").rename(tmp_path / "old")
    (tmp_path / "source").write_bytes(b"wrong")
    part = part_of(tmp_path, 5)
    engine.copy(source, part, TIMEOUT)
    assert part.read_bytes() == b"right"


def test_the_reserved_file_itself_is_filled(tmp_path: Path, engine: Engine, source: int) -> None:
    """A new file in its place would need the space twice, and lose the reservation."""
    os.write(source, b"right")
    part = part_of(tmp_path, 5)
    inode = part.stat().st_ino
    engine.copy(source, part, TIMEOUT)
    assert part.stat().st_ino == inode
    assert sorted(os.listdir(tmp_path)) == ["image", "source"]


def test_a_copy_that_cannot_be_written_says_so(tmp_path: Path, engine: Engine, source: int) -> None:
    os.write(source, b"right")
    with pytest.raises((Failed, OSError)):
        engine.copy(source, tmp_path / "nothing/image", TIMEOUT)


def test_a_copy_ends_with_the_patience_for_it(tmp_path: Path, engine: Engine, source: int) -> None:
    os.truncate(source, 1 << 30)
    part = part_of(tmp_path, 1)
    with pytest.raises(run.TimedOut):
        engine.copy(source, part, 0.0)


def test_rsync_that_is_not_installed_is_explained(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.ENVIRONMENT, "PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failed, match="rsync is not installed"):
        ENGINES["rsync"].copy(source, part_of(tmp_path, 1), TIMEOUT)
