"""A directory as the stager's source: when it counts as settled, and what may not change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forestage.clock import Clock
from forestage.data import erofs, manifest
from forestage.data.tree import OpenTree
from forestage.errors import Declined
from forestage.stage.source import Truncated
from forestage.system import writers
from forestage.system.as_user import User

HOUR = 3600.0


class Told(Clock):
    """`ahead` of the file system's; touches a file while somebody sleeps."""

    def __init__(self, ahead: float, touched: Path) -> None:
        self.ahead = ahead
        self.touched = touched
        self.slept = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.touched.write_bytes(b"other")


class Top:
    """A directory with a file, looked at, and opened as of so many seconds from now."""

    def __init__(self, path: Path, user: User) -> None:
        self.path = path
        self.user = user
        self.clock = Told(HOUR, path / "file")
        self.root, self.resolved = manifest.open_root(str(path), user)

    def opened(self, looked: float) -> OpenTree:
        found = manifest.take(self.root, self.resolved, self.user, 100)
        made = erofs.layout(found, {})
        looked += time.time()
        return OpenTree(self.root, found, made, self.user, 100, self.clock, looked)


@pytest.fixture
def top(tmp_path: Path, me: User) -> Iterator[Top]:
    (tmp_path / "file").write_bytes(b"12345")
    made = Top(tmp_path, me)
    yield made
    os.close(made.root)


def read(tree: OpenTree) -> bytes:
    memory = bytearray(tree.made.size)
    tree.read(0, memoryview(memory))
    return bytes(memory[tree.made.starts[0] :][:5])


def test_tree_that_has_just_changed_is_looked_at_once_more_after_a_pause(top: Top) -> None:
    """However long ago by now: what was looked at may have changed within the same tick."""
    with pytest.raises(Declined) as caught:
        top.opened(0.0).open()
    assert caught.value.reason == "changed"
    assert top.clock.slept > 0


def test_tree_that_had_not_changed_for_long_is_not_looked_at_again(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = top.opened(HOUR)
    monkeypatch.setattr(manifest, "take", lambda *_: pytest.fail("looked at once more"))
    source = tree.open()
    assert top.clock.slept == 0
    assert (source.size, source.own) == (tree.made.size, len(tree.made.head))


def test_bytes_are_those_of_the_files(top: Top) -> None:
    assert read(top.opened(HOUR)) == b"12345"


@pytest.mark.parametrize("change", ["written", "replaced", "link", "fifo"])
def test_file_that_is_no_longer_the_one_looked_at_is_not_read(top: Top, change: str) -> None:
    tree, file = top.opened(HOUR), top.path / "file"
    other = top.path / "other"
    other.write_bytes(b"54321")
    if change == "written":
        file.write_bytes(b"54321")
    else:
        file.unlink()
    if change == "replaced":
        other.rename(file)
    elif change == "link":
        file.symlink_to("other")
    elif change == "fifo":
        os.mkfifo(file)
    with pytest.raises(Declined):
        read(tree)


def test_file_that_becomes_shorter_while_it_is_read_has_no_copy(top: Top) -> None:
    tree = top.opened(HOUR)
    read(tree)
    os.truncate(top.path / "file", 3)
    with pytest.raises(Truncated):
        read(tree)


def test_file_that_somebody_may_write_to_is_not_read(top: Top) -> None:
    tree = top.opened(HOUR)
    with (top.path / "file").open("r+b"), pytest.raises(Declined) as caught:
        read(tree)
    assert caught.value.reason == "written"
    assert str(top.path / "file") in str(caught.value)


def test_writer_that_came_while_a_file_was_read_is_found_as_well(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store through a mapping, between the read and the end of the look, shows in no time."""
    tree, came = top.opened(HOUR), []
    real = os.preadv

    def preadv(fd: int, *more: Any) -> int:
        came.append((top.path / "file").open("r+b"))
        return real(fd, *more)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(Declined) as caught:
        read(tree)
    assert caught.value.reason == "written"
    came[0].close()


def test_where_leases_prove_nothing_all_processes_are_looked_at_twice_for_all_files(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (top.path / str(number)).write_bytes(b"x")
    tree, looks, found = top.opened(HOUR), [], ""
    monkeypatch.setattr(writers, "by_lease", lambda _: None)
    monkeypatch.setattr(writers, "proves", lambda _: False)
    monkeypatch.setattr(writers, "find", lambda path, _: looks.append(path) or found)
    tree.open()
    read(tree)
    tree.must_be_unchanged()
    assert looks == 2 * [str(top.path)]
    found = str(top.path / "file")
    for look in (tree.open, tree.must_be_unchanged):
        with pytest.raises(Declined) as caught:
            look()
        assert caught.value.reason == "written"
