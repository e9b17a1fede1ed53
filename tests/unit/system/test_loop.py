"""Loop devices: one for each file, and nobody's but ours is let go of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.system import loop


def of(file: Path) -> list[loop.LoopDevice]:
    return [one for one in loop.list_attached_devices() if one.is_of(file.stat())]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "image"
    file.write_bytes(b"x" * 8192)
    yield file
    file.touch()
    for one in of(file):
        loop.detach_device(one)


def test_file_has_one_device_however_often_it_is_attached(image: Path) -> None:
    name = loop.attach_file(image, read_only=True)
    assert loop.attach_file(image, read_only=True) == name
    assert [one.name for one in of(image)] == [name]
    assert Path(name).read_bytes() == b"x" * 8192


def test_device_that_another_file_has_by_now_is_not_detached(image: Path) -> None:
    """The list that names it may be older."""
    name = loop.attach_file(image, read_only=True)
    (one,) = of(image)
    loop.detach_device(loop.LoopDevice(name, one.file, one.disk, one.inode + 1))
    assert of(image) == [one]
    loop.detach_device(one)
    assert of(image) == []


def test_device_that_goes_with_its_last_use_is_kept_by_the_next(image: Path) -> None:
    name = loop.attach_file(image, read_only=True)
    with Path(name).open("rb"):
        loop.detach_device(of(image)[0])
        assert loop.attach_file(image, read_only=True) == name
    assert [one.name for one in of(image)] == [name]


def test_file_without_a_name_is_told(image: Path) -> None:
    loop.attach_file(image, read_only=True)
    facts = image.stat()
    image.unlink()
    (one,) = [one for one in loop.list_attached_devices() if one.is_of(facts)]
    assert one.is_deleted
    loop.detach_device(one)
