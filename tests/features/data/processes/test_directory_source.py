"""A directory as the stager's source: when it counts as settled, and what may not change."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forestage.clock import Clock
from forestage.errors import Declined, Failed
from forestage.features.data import erofs, file_readers, manifest
from forestage.features.data.directory_source import SMALL, DirectorySource
from forestage.features.data.file_readers import MAX_REQUEST_PIECES, OpenDirectory
from forestage.features.data.manifest import ManifestEntry
from forestage.sources.source import SourceTruncated, SourceUnreadable
from forestage.system import file_systems, writers
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
        self.trees: list[DirectorySource] = []

    def opened(self, looked: float, most: int = 100) -> DirectorySource:
        found = manifest.scan_directory(self.root, self.resolved, self.user, most)
        made = erofs.compute_layout(found, {})
        looked += time.time()
        tree = DirectorySource(self.root, found, made, self.user, most, self.clock, looked)
        self.trees.append(tree)
        return tree

    def close(self) -> None:
        for tree in self.trees:
            tree.close()
        os.close(self.root)


@pytest.fixture
def top(tmp_path: Path, me: User) -> Iterator[Top]:
    (tmp_path / "file").write_bytes(b"12345")
    made = Top(tmp_path, me)
    yield made
    made.close()


def read(tree: DirectorySource) -> bytes:
    memory = bytearray(tree.layout.size)
    tree.read(0, memoryview(memory))
    return bytes(memory[tree.layout.starts[0] :][:5])


def test_opening_a_just_changed_directory_pauses_rescans_and_declines_a_further_change(
    top: Top,
) -> None:
    """However long ago by now: what was looked at may have changed within the same tick."""
    with pytest.raises(Declined) as caught:
        top.opened(0.0).open()
    assert caught.value.reason == "changed"
    assert top.clock.slept > 0


def test_opening_a_directory_unchanged_for_long_does_not_scan_again(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = top.opened(HOUR)
    monkeypatch.setattr(manifest, "scan_directory", lambda *_: pytest.fail("looked at once more"))
    source = tree.open()
    assert top.clock.slept == 0
    assert (source.size, source.local_bytes) == (tree.layout.size, len(tree.layout.head))


def test_directory_source_reads_the_bytes_of_a_file(top: Top) -> None:
    assert read(top.opened(HOUR)) == b"12345"


def test_directory_source_reads_each_file_at_its_offset_in_the_image(top: Top) -> None:
    """More than one request of a process takes, and one that a thread of the copy reads itself."""
    (top.path / "folder").mkdir()
    for number in range(MAX_REQUEST_PIECES + 10):
        (top.path / f"folder/{number}").write_bytes(b"%d" % number * (number % 7))
    for size in (SMALL, SMALL + 1, 3 * SMALL):
        (top.path / str(size)).write_bytes(os.urandom(size))
    tree = top.opened(HOUR, most=2 * MAX_REQUEST_PIECES)
    memory = bytearray(tree.layout.size)
    tree.read(0, memoryview(memory))
    for start, number in zip(tree.layout.starts, tree.layout.numbers, strict=True):
        file = tree.manifest.files[number]
        there = (top.path / os.fsdecode(file.path)).read_bytes()
        assert bytes(memory[start : start + file.size]) == there


def test_directory_source_raises_the_name_of_an_unreadable_file_and_leaves_the_buffer_zero(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files of the same request may have been read before: their process keeps them."""
    (top.path / "other").write_bytes(b"other")
    real = file_readers.read_file_into

    def read_into(tree: OpenDirectory, file: ManifestEntry, *more: Any) -> None:
        if file.path == b"other":
            raise OSError(errno.EIO, "unreadable")
        real(tree, file, *more)

    monkeypatch.setattr(file_readers, "read_file_into", read_into)
    tree = top.opened(HOUR)
    memory = bytearray(tree.layout.size)
    with pytest.raises(SourceUnreadable) as caught:
        tree.read(0, memoryview(memory))
    assert caught.value.error.errno == errno.EIO
    assert str(top.path / "other") in str(caught.value)
    assert not any(memory[len(tree.layout.head) :])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_directory_source_read_fails_if_the_file_reader_process_dies(
    top: Top, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "meanwhile":
        monkeypatch.setattr(file_readers, "read_file_into", lambda *_: os._exit(0))
    tree = top.opened(HOUR)
    if when == "before":
        for reader in tree.readers.processes:
            os.kill(reader.pid, signal.SIGKILL)
            os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(Failed, match="died"):
        read(tree)


def test_directory_source_read_fails_if_the_file_reader_process_fills_too_few_bytes(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, real = top.opened(HOUR), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: real(*args) - 1)
    with pytest.raises(Failed, match="not all there"):
        read(tree)


def test_closing_a_directory_source_kills_stopped_file_reader_processes(top: Top) -> None:
    tree = top.opened(HOUR)
    pids = [reader.pid for reader in tree.readers.processes]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    tree.close()
    top.trees.clear()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_closing_a_directory_source_ends_its_file_reader_processes(top: Top) -> None:
    tree = top.opened(HOUR)
    pids = [reader.pid for reader in tree.readers.processes]
    tree.close()
    top.trees.clear()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- hard links


@pytest.mark.parametrize("change", ["broken", "written", "made"])
def test_hard_link_broken_or_made_during_the_copy_is_declined_as_changed(
    top: Top, change: str
) -> None:
    (top.path / "further").hardlink_to(top.path / "file")
    tree = top.opened(HOUR)
    assert len(tree.manifest.links) == 1
    assert read(tree) == b"12345"
    tree.check_unchanged()
    if change == "made":
        (top.path / "third").hardlink_to(top.path / "file")
    else:
        (top.path / "further").unlink()
        (top.path / "further").write_bytes(b"12345" if change == "broken" else b"other")
    with pytest.raises(Declined) as caught:
        tree.check_unchanged()
    assert caught.value.reason == "changed"


def test_copy_by_another_nodes_scan_checks_all_hard_links_of_the_files_read_again(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "c"):
        (top.path / name).hardlink_to(top.path / "file")
    tree, asked = top.opened(HOUR), []
    tree.is_from_peer = True
    read(tree)
    monkeypatch.setattr(manifest, "sample_files", lambda _: [])
    monkeypatch.setattr(
        manifest, "are_files_unchanged", lambda _, files, __: bool(asked.extend(files)) or True
    )
    tree.check_unchanged()
    assert [one.path for one in asked] == [b"b", b"c", b"file"]


# --- holes


def with_holes(top: Top, data: dict[str, tuple[int, list[int]]]) -> DirectorySource:
    """A tree of these files: their size in blocks, and the blocks that have bytes."""
    for name, (size, blocks) in data.items():
        with (top.path / name).open("wb") as file:
            file.truncate(size * erofs.BLOCK)
            for number in blocks:
                file.seek(number * erofs.BLOCK)
                file.write(b"x" * erofs.BLOCK)
    return top.opened(HOUR)


def in_full(tree: DirectorySource, chunk: int) -> set[int]:
    """The chunks that have a byte other than 0."""
    memory = bytearray(tree.layout.size)
    tree.read(0, memoryview(memory))
    starts = range(0, len(memory), chunk)
    return {at // chunk for at in starts if any(memory[at : at + chunk])}


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=25,
)
@given(
    files=st.lists(st.tuples(st.integers(0, 40), st.sets(st.integers(0, 39))), max_size=6),
    blocks=st.integers(1, 9),
)
def test_chunk_map_of_a_directory_never_takes_a_chunk_with_data_for_a_hole(
    top: Top, files: list[tuple[int, set[int]]], blocks: int
) -> None:
    named = {
        str(number): (size, sorted(block for block in data if block < size))
        for number, (size, data) in enumerate(files)
    }
    tree, chunk = with_holes(top, named), blocks * erofs.BLOCK
    found, head = tree.map_chunks(chunk).to_read, -(-len(tree.layout.head) // chunk)
    assert found - set(range(head)) == in_full(tree, chunk) - set(range(head))
    assert set(range(head)) <= found


def test_sparse_file_is_read_in_full_if_lseek_cannot_find_holes(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = with_holes(top, {"hole": (30, [])})

    def unable(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "lseek", unable)
    assert tree.map_chunks(erofs.BLOCK).to_read == set(range(tree.layout.size // erofs.BLOCK))


def test_holes_of_files_on_a_fuse_file_system_are_read(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = with_holes(top, {"hole": (30, [3, 4]), "whole": (2, [0, 1])})
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda _: 0x65735546)
    found = tree.map_chunks(erofs.BLOCK)
    hole = next(
        start // erofs.BLOCK
        for start, number in zip(tree.layout.starts, tree.layout.numbers, strict=True)
        if tree.manifest.files[number].path == b"hole"
    )
    assert found.to_read == set(range(tree.layout.size // erofs.BLOCK))
    assert found.likely_sparse == set(range(hole, hole + 30))
    assert found.likely_sparse & found.to_reserve == {hole + 3, hole + 4}


def test_files_without_holes_are_not_opened_for_the_chunk_map(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = with_holes(top, {"whole": (3, [0, 1, 2]), "short": (0, [])})
    monkeypatch.setattr(DirectorySource, "_open", lambda *_: pytest.fail("opened"))
    assert tree.map_chunks(erofs.BLOCK).to_read == set(range(tree.layout.size // erofs.BLOCK))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_chunk_map_of_a_sparse_file_open_for_writing_is_declined(
    top: Top, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tree, hole, came = with_holes(top, {"hole": (30, [])}), top.path / "hole", []
    real = os.lseek

    def lseek(fd: int, at: int, how: int) -> int:
        came.append(hole.open("r+b"))
        return real(fd, at, how)

    if when == "before":
        came.append(hole.open("r+b"))
    else:
        monkeypatch.setattr(os, "lseek", lseek)
    with pytest.raises(Declined) as caught:
        tree.map_chunks(erofs.BLOCK)
    assert caught.value.reason == "written"


def test_sparse_file_written_after_the_scan_is_declined_as_changed(top: Top) -> None:
    tree = with_holes(top, {"hole": (30, [])})
    with (top.path / "hole").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(Declined) as caught:
        tree.map_chunks(erofs.BLOCK)
    assert caught.value.reason == "changed"


def test_copy_by_another_nodes_scan_checks_sparse_files_again(top: Top) -> None:
    """It is not read, yet what is shown of it is this node's word."""
    tree = with_holes(top, {"hole": (30, [])})
    tree.is_from_peer = True
    tree.map_chunks(erofs.BLOCK)
    (number,) = tree.manifest.sparse
    assert tree.files_read == {number}


@pytest.mark.parametrize("change", ["written", "replaced", "link", "fifo"])
def test_file_written_or_replaced_after_the_scan_is_not_read(top: Top, change: str) -> None:
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


def test_file_truncated_while_it_is_read_raises_source_truncated(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_readers.read_file_into

    def read_into(*more: Any) -> None:
        os.truncate(top.path / "file", 3)
        real(*more)

    monkeypatch.setattr(file_readers, "read_file_into", read_into)
    tree = top.opened(HOUR)
    with pytest.raises(SourceTruncated):
        read(tree)


def test_file_with_an_open_writer_before_the_read_is_declined_as_written(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they have written when it is asked again, after the read."""
    writer, real = (top.path / "file").open("r+b"), file_readers.read_file_into

    def read_into(*more: Any) -> None:
        writer.close()
        real(*more)

    monkeypatch.setattr(file_readers, "read_file_into", read_into)
    tree = top.opened(HOUR)
    with pytest.raises(Declined) as caught:
        read(tree)
    writer.close()
    assert caught.value.reason == "written"
    assert str(top.path / "file") in str(caught.value)


def test_file_opened_for_writing_during_the_read_is_declined_as_written(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store through a mapping, between the read and the end of the look, shows in no time."""
    came, real = [], os.preadv

    def preadv(fd: int, *more: Any) -> int:
        came.append((top.path / "file").open("r+b"))
        return real(fd, *more)

    monkeypatch.setattr(os, "preadv", preadv)
    tree = top.opened(HOUR)
    with pytest.raises(Declined) as caught:
        read(tree)
    assert caught.value.reason == "written"


def test_writers_are_searched_in_proc_twice_per_directory_if_file_leases_prove_nothing(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (top.path / str(number)).write_bytes(b"x")
    tree, looks, found = top.opened(HOUR), [], ""
    monkeypatch.setattr(writers, "has_writer_by_lease", lambda _: None)
    monkeypatch.setattr(writers, "is_lease_conclusive", lambda _: False)
    monkeypatch.setattr(
        writers, "find_open_for_writing", lambda path, _: looks.append(path) or found
    )
    tree.open()
    read(tree)
    tree.check_unchanged()
    assert looks == 2 * [str(top.path)]
    found = str(top.path / "file")
    for look in (tree.open, tree.check_unchanged):
        with pytest.raises(Declined) as caught:
            look()
        assert caught.value.reason == "written"
