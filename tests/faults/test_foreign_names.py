"""In a mount namespace of their own users give any file the name of another user's.

A file system in user space says what inode, times, owner and mode its files have. So it may serve
other bytes under the identity of any file; and there is one that all users have: squashfuse, which
serves what `stage=FILE@/mount/point` mounts, and which its user may trace.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from far import Far

from forestage.clock import Clock
from forestage.errors import Declined
from forestage.features.data import erofs, manifest
from forestage.features.data.directory_source import DirectorySource
from forestage.system import mounts
from node import ALICE, BOB, Node, content, read_as


@pytest.fixture
def image(node: Node, far: Far) -> Path:
    """Bob's image, in his directory. The user's own file system has it with other bytes."""
    path = node.put("bob/set/image.sqsh", content(1), BOB)
    os.link(node.server / "bob/set/image.sqsh", far.folder / "image.sqsh")
    far.behaves(forges=1)
    assert (far.point / "image.sqsh").read_bytes() != content(1)
    return path


@contextmanager
def mapped(bound: Path, target: Path) -> Iterator[Path]:
    """The root directory of a process of alice's, to which one file is another."""
    script = f"mount --bind {bound} {target} && echo ready && exec sleep inf"
    argv = ["unshare", "-Urm", "--propagation", "private", "sh", "-c", script]
    alices = subprocess.Popen(
        argv, stdout=subprocess.PIPE, user=ALICE.uid, group=ALICE.gid, extra_groups=[]
    )
    try:
        assert alices.stdout is not None
        assert alices.stdout.readline() == b"ready\n"
        yield Path(f"/proc/{alices.pid}/root")
    finally:
        alices.kill()
        alices.communicate()


def test_image_forged_in_a_users_mount_namespace_is_declined_and_not_cached(
    node: Node, far: Far, image: Path
) -> None:
    with mapped(far.point / "image.sqsh", image) as root:
        ran = node.prolog(1, f"{root}{image}")
        assert ran.ended == (0, "declined", "bad-path")
        assert node.entries() == set()
        assert node.prolog(2, image, BOB).said == ("copied", "")
        assert read_as(BOB, image) == content(1)


def test_path_in_a_users_mount_namespace_unmounts_no_redirect(
    node: Node, far: Far, image: Path
) -> None:
    assert node.prolog(1, image, BOB).said == ("copied", "")
    with mapped(far.point / "image.sqsh", image) as root:
        assert node.prolog(2, f"{root}{image}").said == ("declined", "bad-path")
        assert node.shows_entry(image, node.identity(image).key)


def test_directory_in_a_users_mount_namespace_is_declined(
    node: Node, far: Far, image: Path
) -> None:
    """It is the very directory, and what is mounted in it another."""
    with mapped(far.point / "image.sqsh", image) as root:
        named = Path(f"{root}{image.parent}")
        assert named.samefile(image.parent)
        with pytest.raises(Declined, match="as this node sees it") as caught:
            manifest.open_root(str(named), ALICE)
        assert caught.value.reason == "bad-path"


def test_file_mounted_into_a_directory_during_its_copy_ends_the_copy(
    node: Node, far: Far, image: Path
) -> None:
    root, path = manifest.open_root(str(image.parent), BOB)
    found = manifest.scan_directory(root, path, BOB, 100)
    made = erofs.compute_layout(found, {})
    tree = DirectorySource(root, found, made, BOB, 100, Clock(), 0.0)
    mounts.mount(str(far.point / "image.sqsh"), str(image), mounts.MS_BIND)
    with pytest.raises(Declined) as caught:
        tree.read(0, memoryview(bytearray(made.size)))
    assert caught.value.reason == "changed"
    tree.close()
    os.close(root)
