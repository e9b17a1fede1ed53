"""What tests of single modules share: a cache, leases, a source, below a folder of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from commands import Site
from forestage.cache import source_image
from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.part import Part, PartRecord
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.clock import Clock
from forestage.config import Config
from forestage.paths import NodePaths
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.sources.source import OpenImage
from forestage.system import run
from forestage.system.as_user import User
from forestage.units import SizeOrShare

REFERENCE = "nvcr.io#nvidia/pytorch:25.01-py3"
PATIENCE = 600.0  # seconds for a look; what hangs, pytest ends sooner


@pytest.fixture(scope="module", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """No test here pulls the plug; that fsync is called in time is asserted where it matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file as well
        yield


@pytest.fixture
def me() -> User:
    """The user who runs the tests; becoming oneself needs no root."""
    return User("", os.getuid(), os.getgid())


@pytest.fixture
def as_root() -> None:
    """Skips for an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A node on which commands are run."""
    return Site(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.prepare(require_mount=False)
    return made


@pytest.fixture
def leases(tmp_path: Path) -> LeaseDirectory:
    return LeaseDirectory(tmp_path / "run/leases")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The folder that stands for the shared file system."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """A part with nothing in it."""
    (tmp_path / "part").mkdir()
    return Part(tmp_path / "part")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    """An empty file, open for reading and writing."""
    fd = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def look(shared: Path, me: User) -> Callable[[Path], OpenImage]:
    """Opens an image as a hook does before it stages it."""

    def looking(path: Path) -> OpenImage:
        found, fd = opening.open_descriptor_as_user(str(path), me, [str(shared)], None, PATIENCE)
        assert fd is not None
        return OpenImage(source_image.check_image(found, None), me, fd)

    return looking


@pytest.fixture
def make_image() -> Callable[..., SourceImage]:
    """An image as a literal; keywords change its identity."""

    def making(**changes: object) -> SourceImage:
        identity = FileIdentity(path="/lustre/a.sqsh", inode=1, size=5, mtime_ns=10, ctime_ns=20)
        return SourceImage(msgspec.structs.replace(identity, **changes), AccessRights(0, 0, 0o644))

    return making


@pytest.fixture
def publish(cache: Cache) -> Callable[[SourceImage], Entry]:
    """Puts an entry with some bytes of the right number into the cache."""

    def publishing(wanted: SourceImage) -> Entry:
        cache.part_dir(wanted.key).mkdir()
        cache.part(wanted.key).image.write_bytes(b"x" * wanted.size)
        entry = Entry(wanted.key, wanted.identity, wanted.access, created=1.0, engine="rsync")
        cache.publish(entry)
        return entry

    return publishing


def half(cache: Cache, key: str, boot: str | None, uid: int = 0) -> None:
    """A part that a stager of that boot left; None: it did not come to say whose it is."""
    part = cache.part(key)
    part.directory.mkdir()
    part.image.write_bytes(b"half")
    if boot is not None:
        wanted = SourceImage(FileIdentity("/a", 1, 8, 1, 1), AccessRights(0, 0, 0o644))
        part.write_record(PartRecord(1, boot, wanted, 4, "chunks", 7, 1.0, uid=uid))


class Settled(Clock):
    """An hour ahead of the file system's: no source is so new that a copy of it must wait."""

    def wall(self) -> float:
        return super().wall() + 3600


@pytest.fixture
def staging_node(tmp_path: Path, cache: Cache, shared: Path) -> Node:
    """A node that may stage whatever fits on the disk."""
    config = Config(
        sources=(str(shared),),
        chunk_size=1 << 16,
        threads=2,
        max_size=SizeOrShare(share=1.0),
        min_free=SizeOrShare(size=0),
    )
    places = NodePaths(tmp_path)
    return Node(config, places, cache, LeaseDirectory(places.leases), Settled())


@pytest.fixture
def configured(staging_node: Node) -> Callable[..., Node]:
    """The node with other keys of its configuration."""
    return staging_node.with_config


@pytest.fixture
def asking(me: User) -> Job:
    """The job that asks."""
    return Job(7, me, "n1", "batch", "/", requests=(), saves=None, hints=JobHints())


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """An `lfs` on PATH that is this script; what it was asked is in the file that comes back."""

    def faking(script: str) -> Path:
        folder, asked = tmp_path / "bin", tmp_path / "asked"
        folder.mkdir()
        program = folder / "lfs"
        program.write_text(f'#!/bin/sh\necho "$*" >>{asked}\n{script}\n')
        program.chmod(0o755)
        path = f"{folder}:{run.PATH}"
        monkeypatch.setattr(run, "PATH", path)
        monkeypatch.setitem(run.ENVIRONMENT, "PATH", path)
        asked.touch()
        return asked

    return faking


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A job's cgroup in a hierarchy of this machine."""
    top = next((spot for spot in (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup"))
                if os.access(spot / "cgroup.procs", os.W_OK)), None)  # fmt: skip
    if top is None:
        pytest.skip("no cgroup hierarchy can be written here")
    made = top / f"forestage-test-{os.getpid()}" / "job_7"
    made.mkdir(parents=True)
    yield made
    made.rmdir()
    made.parent.rmdir()


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called, in Python and in C: each system call is made by one."""
    counted = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    work()  # what is done only the first time
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted
