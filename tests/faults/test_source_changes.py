"""The source changes while it is copied: no job ever gets a mixture, nor the file of before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fault import CHUNKS, MIB, Points, image, kill_stager, served, untouched

import squashfs
from node import Node

NAME = "alice/sub/image.sqsh"
HALF = CHUNKS * MIB // 2


def _source(node: Node) -> Path:
    return node.server / NAME


def _shorten(node: Node) -> None:
    """To half of it, of which its superblock knows: else it is truncated, and not staged."""
    with _source(node).open("r+b") as file:
        file.truncate(HALF)
        file.write(squashfs.beginning(image()[:HALF])[:48])


def _grow(node: Node) -> None:
    with _source(node).open("ab") as file:
        file.write(image(2))


def _overwrite(node: Node) -> None:
    with _source(node).open("r+b") as file:
        file.seek(HALF)
        file.write(image(2)[HALF:])


def _overwrite_and_set_time_back(node: Node) -> None:
    before = _source(node).stat()
    _overwrite(node)
    os.utime(_source(node), ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(node: Node) -> None:
    new = node.server / node.put("alice/sub/new", image(2)).relative_to(node.shared)
    new.replace(_source(node))


def _delete(node: Node) -> None:
    _source(node).unlink()


def _close_file(node: Node) -> None:
    _source(node).chmod(0)


def _close_folder(node: Node) -> None:
    # 65534 owns the folder, so its own bits count.
    _source(node).parent.chmod(0)


def _move_folder(node: Node) -> None:
    _source(node).parent.rename(node.server / "alice/other")


# Made when they are needed: each fork of all these tests would copy their pages' table.
CHANGED: list[tuple[Callable[[Node], None], Callable[[], bytes]]] = [
    (_shorten, lambda: squashfs.beginning(image()[:HALF])),
    (_grow, lambda: image() + image(2)),
    (_overwrite, lambda: image()[:HALF] + image(2)[HALF:]),
    (_overwrite_and_set_time_back, lambda: image()[:HALF] + image(2)[HALF:]),
    (_replace, lambda: image(2)),
]
GONE = [
    (_delete, "missing"),
    (_close_file, "no-permission"),
    (_close_folder, "no-permission"),
    (_move_folder, "missing"),
]
MOMENTS = [
    ("chunks", "reserved", 1),
    ("chunks", "chunk", 2),
    ("chunks", "copied", 1),
    ("rsync", "reserved", 1),
    ("rsync", "copied", 1),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("engine", "point", "nth"), MOMENTS)
@pytest.mark.parametrize(("change", "after"), CHANGED, ids=[c.__name__ for c, _ in CHANGED])
def test_source_changed_during_the_copy_is_copied_again_and_served(
    node: Node,
    points: Points,
    engine: str,
    point: str,
    nth: int,
    change: Callable[[Node], None],
    after: Callable[[], bytes],
) -> None:
    node.configure(engine=engine)
    path = node.put(NAME, image())
    before = node.identity(path).key
    points.at(point, lambda: change(node), nth)

    ran = node.prolog(1, path)

    assert (ran.code, *ran.said) == (0, "copied", "")
    assert [o.reason for o in node.outcomes("stager")] == ["changed", ""]
    assert served(node, path, after())
    assert node.entries() == {node.identity(path).key} != {before}


@pytest.mark.parametrize(("engine", "point", "nth"), MOMENTS)
@pytest.mark.parametrize(("change", "reason"), GONE, ids=[c.__name__ for c, _ in GONE])
def test_source_deleted_or_closed_to_the_user_during_the_copy_is_not_served(
    node: Node,
    points: Points,
    engine: str,
    point: str,
    nth: int,
    change: Callable[[Node], None],
    reason: str,
) -> None:
    node.configure(engine=engine)
    path = node.put(NAME, image())
    points.at(point, lambda: change(node), nth)

    ran = node.prolog(1, path)

    assert (ran.code, *ran.said) == (0, "declined", reason)
    assert node.binds() == {}
    assert node.lease(1) is None
    assert node.entries() == set()
    assert node.parts() == []


def test_source_that_changes_during_each_copy_is_declined_after_two_tries(
    node: Node, points: Points
) -> None:
    path = node.put(NAME, image())
    points.at("copied", lambda: os.utime(_source(node)), nth=None)
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, "declined", "changed")
    assert [o.reason for o in node.outcomes("stager")] == ["changed", "changed"]
    assert untouched(node, path, 1)
    assert node.entries() == set()
    assert node.parts() == []


def test_changed_source_does_not_resume_the_part_of_its_earlier_version(
    node: Node, points: Points
) -> None:
    path = node.put(NAME, image())
    points.at("copied", kill_stager, nth=None)
    assert node.prolog(1, path).said == ("failed", "copy")
    points.calm()
    _overwrite(node)
    before = points.count("chunk")
    assert node.prolog(2, path).outcome.result == "copied"
    assert points.count("chunk") - before == CHUNKS
    assert path.read_bytes() == image()[:HALF] + image(2)[HALF:]
    node.epilog(2)
    assert len(node.parts()) <= 1  # the one of before stays until its room is needed
