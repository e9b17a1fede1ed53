"""A file system that says what is not true: of holes, blocks, names, times and sizes.

What is published has the source's bytes, to the last one. A round is drawn by its number alone;
FORESTAGE_TEST_ROUNDS=200 makes it so many rounds.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from far import Far

from forestage import trace
from forestage.cache import digest
from forestage.cache.node import Node as Bare
from forestage.clock import Clock
from forestage.config import load_config
from forestage.features.data import directory_source, erofs, manifest
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.sources.source import OpenImage
from forestage.stage import stager
from forestage.stage.task import CopyTask
from forestage.system import as_user, files
from forestage.system.daemon import StartReport
from node import ALICE, Node

CHUNK = 1 << 20
BLOCK = 4096
ROUNDS = int(os.environ.get("FORESTAGE_TEST_ROUNDS", "12"))
LIES = ({"nodata": 1}, {"later": 20480}, {"later": 64}, {"same": 1})
# What makes it another file, or one that cannot be read to its end.
CHANGES = ("ago", "longer", "inodes")


class Copied(msgspec.Struct, frozen=True):
    """How a copy ended; whether its entry has the true bytes, None without one; its blocks."""

    ended: StartReport
    is_right: bool | None = None
    blocks: int = 0


class Copier:
    """Copies what lies on a far file system, as a stager does, each in a process of its own."""

    def __init__(self, node: Node, far: Far) -> None:
        self.far = far
        node.configure(redirect="none", min_free=0)
        config = load_config(node.places.etc).for_partition("batch")
        self.node = Bare(config, node.places, node.cache, node.leases, Clock())
        self.job = Job.from_environ(node.environ(1))
        node.cache.prepare(require_mount=False)

    def copy(self, name: str) -> Copied:
        """Copies the image, or the directory, of this name."""
        work = self._tree if (self.far.folder / name).is_dir() else self._image
        return as_user.run_in_child(lambda: (work(name), []), Copied, 600.0)[0]

    def _image(self, name: str) -> Copied:
        path = str(self.far.point / name)
        facts, fd = opening.open_descriptor_as_user(path, ALICE, ["/"], None, 60.0)
        if facts.image is None or fd is None:
            return Copied(StartReport("failed", "missing"))
        opened = OpenImage(facts.image, ALICE, fd)
        return self._copied(opened, (self.far.folder / name).read_bytes())

    def _tree(self, name: str) -> Copied:
        root, resolved = manifest.open_root(str(self.far.point / name), ALICE)
        looked = self.node.clock.wall()
        found = manifest.scan_directory(root, resolved, ALICE, 1000)
        made = erofs.compute_layout(found, {})
        tree = directory_source.DirectorySource(root, found, made, ALICE, 1000, Clock(), looked)
        true = bytearray(made.size)
        true[: len(made.head)] = made.head
        for start, number in zip(made.starts, made.numbers, strict=True):
            file = self.far.folder / name / os.fsdecode(found.files[number].path)
            data = file.read_bytes()
            true[start : start + len(data)] = data
        return self._copied(OpenImage(tree.image, ALICE, root, other_source=tree), bytes(true))

    def _copied(self, opened: OpenImage, true: bytes) -> Copied:
        cache, key = self.node.cache, opened.image.key
        ended = stager.copy_and_report(CopyTask(self.node, self.job, opened), threading.Event())
        entry = cache.find_entry_by_key(key)
        if entry is None:
            return Copied(ended)
        file = cache.image_path(key)
        chunks = (true[at : at + CHUNK] for at in range(0, len(true), CHUNK))
        proven = cache.read_digests(entry) == b"".join(map(digest.digest_chunk, chunks))
        copied = Copied(ended, file.read_bytes() == true and proven, file.stat().st_blocks)
        shutil.rmtree(file.parent)
        return copied


@pytest.fixture
def copier(node: Node, far: Far) -> Copier:
    return Copier(node, far)


def fill(file: Path, size: int, dice: random.Random, holes: float = 0.5) -> None:
    """Makes a file of some bytes and some holes."""
    with file.open("wb") as out:
        out.truncate(size)
        at = 0
        while at < size:
            length = min(size - at, dice.choice((BLOCK, 16 * BLOCK, CHUNK // 2, CHUNK, 2 * CHUNK)))
            if dice.random() >= holes:
                out.seek(at)
                out.write(dice.randbytes(length))
            at += length
    os.chown(file, ALICE.uid, ALICE.gid)


@pytest.mark.ci
@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("blockless", [0, 1])
def test_image_is_copied_correctly_though_its_holes_are_misreported(
    copier: Copier, lie: dict[str, int], blockless: int
) -> None:
    file = copier.far.folder / "image"
    fill(file, 5 * CHUNK + 77, random.Random(1), holes=0.3)
    copier.far.behaves(**lie, blockless=blockless)
    copied = copier.copy("image")
    assert (copied.ended, copied.is_right) == (StartReport("published"), True)


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_directory_is_copied_correctly_though_holes_of_its_files_are_misreported(
    copier: Copier, lie: dict[str, int]
) -> None:
    folder = copier.far.folder / "tree"
    folder.mkdir()
    fill(folder / "sparse", 5 * CHUNK, random.Random(2))
    fill(folder / "dense", CHUNK + 5, random.Random(3), holes=0)
    copier.far.behaves(**lie, blockless=1)
    copied = copier.copy("tree")
    assert (copied.ended, copied.is_right) == (StartReport("published"), True)


@pytest.mark.parametrize("lie", [{}, {"nodata": 1}], ids=str)
def test_copy_of_a_sparse_file_is_sparse_even_without_reported_holes(
    copier: Copier, lie: dict[str, int]
) -> None:
    file = copier.far.folder / "image"
    file.write_bytes(b"x")
    os.truncate(file, 20 * CHUNK)
    copier.far.behaves(**lie)
    copied = copier.copy("image")
    assert copied.is_right
    assert copied.blocks * 512 <= 4 * CHUNK


def test_image_with_link_count_0_is_staged_only_if_its_path_still_leads_to_the_file(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copier.far.put("image", b"x" * CHUNK)
    copier.far.behaves(unlinked=1)
    assert copier.copy("image").ended == StartReport("published")
    copier.far.folder.chmod(0o777)  # it is her who looks, and renames it meanwhile
    real = files.read_fresh_stat

    def removed(fd: int, disk: int, name: bytes = b"") -> os.stat_result | files.Statx:
        file.rename(file.with_name("other"))
        return real(fd, disk, name)

    monkeypatch.setattr(files, "read_fresh_stat", removed)
    assert copier.copy("image").ended.reason == "missing"


def draw_words(dice: random.Random, short: int, has_changes: bool = False) -> dict[str, int]:
    """Draws how the file system behaves; `has_changes`: also so that what it shows is another.

    A read gives `short` bytes at most from the beginning on, or the kernel takes it for the end.
    """
    words = dict(dice.choice(({}, *LIES)))
    if dice.random() < 0.3:
        words["later"] = dice.randrange(1, 6000)
    for word in ("blockless", "unlinked"):
        words[word] = dice.randrange(2)
    words["short"] = short
    if has_changes:
        words[dice.choice(CHANGES)] = dice.choice((1, 4096, 100_000))
    return words


@pytest.mark.ci
def test_copies_from_a_randomly_lying_file_system_publish_only_right_bytes(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for number in range(ROUNDS):
        dice = random.Random(number)
        changes, short = dice.random() < 0.4, dice.choice((0, 0, 5000, 70_000))
        # What it says from these moments on.
        moments = {
            point: draw_words(dice, short, changes and dice.random() < 0.5)
            for point in dice.sample(("claimed", "reserved", "chunk", "copied"), dice.randrange(3))
        }

        def speak(point: str, moments: dict[str, dict[str, int]] = moments) -> None:
            if words := moments.pop(point, None):
                copier.far.behaves(**words)

        monkeypatch.setattr(trace, "listener", speak)
        copier.far.behaves(**draw_words(dice, short))
        put_something(copier.far.folder / f"{number}", dice)
        copied = copier.copy(f"{number}")
        copier.far.behaves()
        remove(copier.far.folder / f"{number}")
        assert copied.is_right is not False, (number, copied.ended)
        assert copied.is_right or changes, (number, copied.ended)
        counts[copied.ended.state] += 1
    print(f"{dict(counts)}, wrong: 0")
    assert counts["published"] > counts["failed"]


def remove(at: Path) -> None:
    if at.is_dir():
        shutil.rmtree(at)
    else:
        at.unlink()


def put_something(at: Path, dice: random.Random) -> None:
    """Makes a file, or a directory of some files."""
    holes = dice.choice((0.0, 0.5, 0.9))
    if dice.random() < 0.5:
        fill(at, dice.randrange(BLOCK, 4 * CHUNK), dice, holes)
        return
    at.mkdir()
    for name in range(dice.randrange(1, 6)):
        fill(at / f"{name}", dice.randrange(1, 2 * CHUNK), dice, holes)
