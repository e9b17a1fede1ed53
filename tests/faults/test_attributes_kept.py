"""A directory on a file system whose attributes, names and listings the kernel keeps, as NFS' are.

Another client changes it. Whoever opens a file there sees the new one at once; so must each look.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache.node import Node as Bare
from forestage.clock import Clock
from forestage.config import load_config
from forestage.errors import Declined
from forestage.features.data import data_view, manifest
from forestage.features.data import requests as data
from forestage.features.data.manifest import DirectoryManifest
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.job import Job
from forestage.sources import opening, source
from forestage.system import files, loop, mounts
from node import ALICE, Node, unmount, until


class Kept:
    """A directory of alice's: `point` as this node sees it, `folder` as another client does."""

    def __init__(self, folder: Path, point: Path) -> None:
        self.folder, self.point = folder, point

    def put(self, name: str, data: bytes) -> None:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        for made in (file.parent, file):
            os.chown(made, ALICE.uid, ALICE.gid)

    def look(self, at: Path | None = None) -> DirectoryManifest:
        root, _ = manifest.open_root(str(at or self.point), ALICE)
        try:
            return manifest.scan_directory(root, "/set", ALICE, 1000)
        finally:
            os.close(root)


@pytest.fixture
def kept(node: Node, nfslike: Path) -> Iterator[Kept]:
    with serving(node, nfslike) as made:
        yield made


@contextlib.contextmanager
def serving(node: Node, nfslike: Path, *how: str) -> Iterator[Kept]:
    node.configure(redirect="spank")
    made = Kept(node.server / ".kept/set", node.shared / "kept/set")
    for folder in (made.folder, node.shared / "kept"):
        folder.mkdir(parents=True)
    for number in range(5):
        made.put(f"{number}", b"version 1")
        made.put(f"sub/{number}", b"version 1")
    point = made.point.parent
    with subprocess.Popen([nfslike, made.folder.parent, point, *how]) as server:
        until(lambda: str(point) in {one.point for one in mounts.list_mounts()}, "nfslike to mount")
        try:
            yield made
        finally:
            for one in loop.list_attached_devices():
                if one.is_on_file_system(node.nvme.stat()):
                    loop.detach_device(one)
            unmount(point)
            server.wait()


def _in_place(kept: Kept) -> None:
    (kept.folder / "sub/3").write_bytes(b"the second version")


def _replaced(kept: Kept) -> None:
    kept.put("../new", b"version 2")
    (kept.folder / "../new").rename(kept.folder / "sub/3")


def _added(kept: Kept) -> None:
    kept.put("sub/new", b"version 2")


def _removed(kept: Kept) -> None:
    (kept.folder / "sub/3").unlink()


def _renamed(kept: Kept) -> None:
    """Another directory of the same names takes the place."""
    (kept.folder / "sub").rename(kept.folder.parent / "old")
    for number in range(5):
        kept.put(f"sub/{number}", b"version 2")


CHANGES = [_in_place, _replaced, _added, _removed, _renamed]
Change = Callable[[Kept], None]


def test_kernel_caches_attributes_and_names_of_the_tests_file_system(kept: Kept) -> None:
    """Or the tests below show nothing."""
    kept.look()
    for change in (_in_place, _added):
        change(kept)
    assert (kept.point / "sub/3").stat().st_size == len(b"version 1")
    assert "new" not in os.listdir(kept.point / "sub")
    assert (kept.point / "sub/3").read_bytes() == b"the second version"


@pytest.mark.parametrize("change", CHANGES)
def test_directory_scan_bypasses_the_kernels_attribute_cache(kept: Kept, change: Change) -> None:
    kept.look()
    change(kept)
    assert kept.look() == kept.look(kept.folder)


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES)
def test_step_is_declined_a_directory_that_changed_on_the_server(
    node: Node, kept: Kept, change: Change
) -> None:
    node.prolog(1, comment=f"stage={kept.point}/")

    def state() -> str:
        one = data_view.read_job_data(node.leases, 1).trees.get(f"{kept.point}/")
        return one.state if one and one.state in ("ready", "declined") else ""

    assert until(state, "the tree") == "ready"
    (hit,) = show(node).outcomes
    assert hit.result == "hit"
    change(kept)
    (outcome,) = show(node).outcomes
    assert (outcome.result, outcome.reason) == ("declined", "changed")


def show(node: Node) -> data.StepPart:
    config = load_config(node.places.etc).for_partition("batch")
    bare = Bare(config, node.places, node.cache, node.leases, Clock())
    job = Job.from_environ(node.environ(1))
    return data.show_job_data(bare, job, HookDeadlines.from_seconds(Clock(), 600.0, None), None)


@pytest.mark.parametrize("change", [_in_place, _replaced, _removed])
def test_sample_check_of_a_scan_detects_a_change_on_the_server(kept: Kept, change: Change) -> None:
    found = kept.look()
    root, _ = manifest.open_root(str(kept.point), ALICE)
    some = [one for one in found.files if one.path in (b"", b"sub", b"sub/3")]
    assert manifest.are_files_unchanged(root, some, ALICE)
    change(kept)
    try:
        assert not manifest.are_files_unchanged(root, some, ALICE)
    except FileNotFoundError:
        assert change is _removed
    finally:
        os.close(root)


def test_statx_queries_the_server_by_descriptor_and_by_name(kept: Kept) -> None:
    kept.look()
    kept.put("1", b"12345")
    root = os.open(kept.point, os.O_RDONLY)
    file = os.open(kept.folder / "1", os.O_RDONLY)
    facts = os.fstat(file)
    for asked in (files.statx_from_server(root, b"1"), files.statx_from_server(file)):
        assert asked[:-1] == tuple(getattr(facts, name) for name in asked._fields[:-1])
    assert files.statx_from_server(root).st_dev == os.fstat(root).st_dev
    with pytest.raises(FileNotFoundError) as caught:
        files.statx_from_server(root, b"none")
    assert caught.value.filename == "none"
    os.close(root)
    os.close(file)


@pytest.mark.parametrize("how", [(), ("promised",)], ids=["asked by open", "a promise"])
def test_file_changed_by_another_client_gets_another_identity(
    node: Node, nfslike: Path, how: tuple[str, ...]
) -> None:
    with serving(node, nfslike, *how) as kept:
        path, file = str(kept.point / "1"), kept.folder / "1"
        with look(path) as before:
            file.write_bytes(b"the second version")
            with look(path) as after:
                assert after.image.identity != before.image.identity
                file.write_bytes(b"the third version")
                with pytest.raises(Declined, match="changed"):
                    source.check_same_file(after)


@contextlib.contextmanager
def look(path: str) -> Iterator[source.OpenImage]:
    found, fd = opening.open_descriptor_as_user(path, ALICE, ["/"], None, 10.0)
    assert found.image is not None
    assert fd is not None
    with contextlib.closing(source.OpenImage(found.image, ALICE, fd)) as opened:
        yield opened
