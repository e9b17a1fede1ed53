"""A user's own directory of imports may have a file system of theirs over it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from far import Far

from forestage.cache.image import Image
from forestage.registry import kept
from forestage.system import as_user, mounts
from node import ALICE, BOB, Node, content

NAME = "ubuntu-0123"
IN_TIME = 5.0


@pytest.fixture(params=[".", "jobs", f"{NAME}.sqsh"])
def covered(request: pytest.FixtureRequest, node: Node, far: Far) -> Path:
    """Alice's directory, of which an import has become an entry; and what she mounted there."""
    node.cache.prepare(require_mount=False)
    own = kept.prepare(node.cache, ALICE) / str(ALICE.uid)
    node.configure(sources=[str(own.parent)])
    image = own / f"{NAME}.sqsh"
    image.write_bytes(content(1))
    os.chown(image, ALICE.uid, ALICE.gid)
    assert node.prolog(1, image).said == ("copied", "")
    (entry,) = node.cache.entries.iterdir()
    made = node.cache.read(entry.name)
    assert made is not None
    kept.note(node.cache, ALICE, NAME, Image(made.identity, made.access))
    assert kept.find(node.cache, ALICE, NAME)
    assert node.epilog(1).code == 0
    (own / "jobs").mkdir()
    for path in (own / "jobs", image):
        os.chown(path, ALICE.uid, ALICE.gid)
    point = far.point if (own / request.param).is_dir() else far.put("file", b"")
    mounts.mount(str(point), str(own / request.param), mounts.MS_BIND)
    far.hang()
    return own / request.param


def in_time(work: Callable[[], object]) -> bool:
    """Whether it ends, in a child that may hang."""
    found = as_user.each([lambda: bool(work()) or True], bool, IN_TIME, IN_TIME, 1)
    return found == [True]


def test_epilog_does_not_wait_for_a_users_file_system_over_their_imports(
    node: Node, covered: Path
) -> None:
    assert in_time(lambda: kept.tidy(node.cache))


def test_users_file_system_over_their_imports_keeps_nobodys_from_being_bounded(
    node: Node, covered: Path
) -> None:
    bobs = kept.prepare(node.cache, BOB) / str(BOB.uid) / "large.sqsh"
    bobs.write_bytes(bytes(100_000))
    os.chown(bobs, BOB.uid, BOB.gid)

    def bound() -> None:
        assert kept.bound(node.cache, 4096, os.stat(bobs).st_ctime + 2 * kept.RECENT) == []

    assert in_time(bound)
    assert not bobs.exists()
    with contextlib.suppress(FileNotFoundError):  # a mount goes with what it lies on
        mounts.umount(str(covered))
    assert list((bobs.parents[1] / str(ALICE.uid)).iterdir()) == []
