"""Loop devices: one for each file, and nobody's but ours is let go of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.system import loop


def of(file: Path) -> list[loop.LoopDevice]:
    return [one for one in loop.list_attached_devices() if one.is_backed_by(file.stat())]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "image"
    file.write_bytes(b"x" * 8192)
    yield file
    file.touch()
    for one in of(file):
        loop.detach_device(one)


def test_file_attached_twice_has_one_loop_device(image: Path) -> None:
    name = loop.attach_file(image, read_only=True)
    assert loop.attach_file(image, read_only=True) == name
    assert [one.name for one in of(image)] == [name]
    assert Path(name).read_bytes() == b"x" * 8192


def test_loop_device_reused_by_another_file_is_not_detached(image: Path) -> None:
    """The list that names it may be older."""
    name = loop.attach_file(image, read_only=True)
    (one,) = of(image)
    loop.detach_device(loop.LoopDevice(name, one.file, one.disk, one.inode + 1))
    assert of(image) == [one]
    loop.detach_device(one)
    assert of(image) == []


def test_loop_device_detached_while_open_is_kept_if_attached_again(image: Path) -> None:
    name = loop.attach_file(image, read_only=True)
    with Path(name).open("rb"):
        loop.detach_device(of(image)[0])
        assert loop.attach_file(image, read_only=True) == name
    assert [one.name for one in of(image)] == [name]


def test_loop_device_of_a_deleted_file_is_listed_as_deleted(image: Path) -> None:
    loop.attach_file(image, read_only=True)
    facts = image.stat()
    image.unlink()
    (one,) = [one for one in loop.list_attached_devices() if one.is_backed_by(facts)]
    assert one.is_file_deleted
    loop.detach_device(one)
