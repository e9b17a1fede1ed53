"""Evicted entries that something has open: they count for their user, and status shows them."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.admin import inventory, status
from forestage.cache import evict, held_open
from forestage.cache.layout import Cache
from forestage.cache.node import Node as Here
from forestage.clock import Clock
from forestage.config import load_settings
from forestage.system import handles, mounts
from forestage.views.job_dir import Taken
from node import ALICE, BOB, SIZE, Node, children_left, content, make_read_only, until

MIB = 1 << 20


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[None]:
    fd = os.open(path, flags)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with memory:
        yield


@contextlib.contextmanager
def bound(path: Path) -> Iterator[None]:
    spot = path.parents[2] / "spot"
    spot.touch()
    mounts.mount(str(path), str(spot), mounts.MS_BIND)
    try:
        yield
    finally:
        mounts.umount(str(spot))
        spot.unlink()


HOLDERS = {
    "descriptor": opened,
    "descriptor of the path": lambda path: opened(path, os.O_PATH),
    "mapping": mapped,
    "mount": bound,
}


@pytest.fixture(autouse=True)
def unredirected(node: Node) -> None:
    """A redirect of the node's would hold the entry as well."""
    node.configure(redirect="none")


def here(node: Node) -> Here:
    return Here.of(load_settings(node.places.etc).of_node, node.places, Clock())


def evicted(node: Node, *keys: str) -> None:
    """Nothing holds them but what the test says: a stager has its files open until it ends."""
    until(lambda: not children_left(), "the stager's end")
    for key in keys:
        node.leases.drop(1)
        assert evict.evict_keys(node.cache, node.leases, [key]) == (key,)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("disk", ["tmpfs", "ext4", "xfs"])
def test_evicted_entry_counts_for_its_user_as_long_as_anything_holds_it(
    node: Node,
    holder: Callable[[Path], contextlib.AbstractContextManager[None]],
    disk: str,
    tmp_path: Path,
) -> None:
    if disk != "tmpfs":
        _format(node, disk, tmp_path / "disk")
    path = node.staged(1)
    key = node.identity(path).key
    with holder(node.cache.image(key)):
        evicted(node, key)
        assert inventory.held(node.cache) == Taken(1, SIZE)
        assert evict.of_users(node.cache) == {ALICE.uid: SIZE}
        text = " ".join(str(piece) for piece in status.pieces(status.gather(here(node)), 0.0))
        assert "256 KiB by 1 deleted file that something has open" in text
    assert inventory.held(node.cache) == Taken()
    assert evict.of_users(node.cache) == {}
    assert list(node.cache.held.iterdir()) == []


def _format(node: Node, kind: str, file: Path) -> None:
    subprocess.run(["truncate", "-s", "400M", file], check=True)
    subprocess.run([f"mkfs.{kind}", "-q", file], check=True)
    subprocess.run(["mount", "-o", "loop", file, node.nvme], check=True)


def test_status_of_a_disk_that_is_read_only_leaves_the_note_of_what_nobody_holds(
    node: Node,
) -> None:
    path = node.staged(1)
    key = node.identity(path).key
    with opened(node.cache.image(key)):
        evicted(node, key)
    make_read_only(node.nvme)
    assert status.state(status.gather(here(node)))[0] == "read-only"
    assert inventory.held(node.cache) == Taken()
    assert len(list(node.cache.held.iterdir())) == 1


def test_nothing_is_noted_of_what_nobody_holds(node: Node) -> None:
    path = node.staged(1)
    evicted(node, node.identity(path).key)
    assert list(node.cache.held.iterdir()) == []


def test_entry_that_several_users_had_counts_for_each_of_them_in_part(node: Node) -> None:
    path = node.staged(1)
    for job in (2, 3):
        node.prolog(job, path, user=BOB)
        node.epilog(job)
    key = node.identity(path).key
    with opened(node.cache.image(key)):
        evicted(node, key)
        assert inventory.held(node.cache) == Taken(1, SIZE)
        assert evict.of_users(node.cache) == {ALICE.uid: SIZE // 2, BOB.uid: SIZE // 2}


def test_entry_that_root_warmed_counts_for_the_users_that_it_had(node: Node) -> None:
    path = node.staged(1)
    key = node.identity(path).key
    (node.cache.entry_dir(key) / "used").write_bytes(b"0")
    node.epilog(1)
    assert [one.user for one in node.cache.stored_entries()] == [None]
    with opened(node.cache.image(key)):
        evicted(node, key)
        assert evict.of_users(node.cache) == {ALICE.uid: SIZE}


def test_two_of_one_key_count_both(node: Node) -> None:
    with contextlib.ExitStack() as holding:
        for job in (1, 2):
            path = node.staged(job)
            key = node.identity(path).key
            holding.enter_context(opened(node.cache.image(key)))
            node.leases.drop(job)
            evicted(node, key)
        assert inventory.held(node.cache) == Taken(2, 2 * SIZE)


def test_part_that_is_read_through_counts_for_who_copied_it(node: Node) -> None:
    path = node.staged(1)
    key = node.identity(path).key
    node.leases.drop(1)
    evicted_part = node.cache.part_dir(key)
    node.cache.entry_dir(key).rename(evicted_part)
    (evicted_part / "owner.json").write_text(f'{{"uid": {BOB.uid}}}')
    with opened(evicted_part / "image"):
        node.cache.drop_part(key)
        assert evict.of_users(node.cache) == {BOB.uid: SIZE}


@pytest.mark.parametrize("killed", ["before the name went", "after"])
def test_note_of_a_process_that_was_killed_is_right_in_the_end(node: Node, killed: str) -> None:
    path = node.staged(1)
    key = node.identity(path).key
    node.leases.drop(1)
    node.cache.evict(key)
    (gone,) = node.cache.evicted.iterdir()
    with opened(gone / "image"):
        with (
            contextlib.suppress(KeyboardInterrupt),
            held_open.noted(node.cache.held, gone / "image", (ALICE.uid,)),
        ):
            if killed == "after":
                shutil.rmtree(gone)
            raise KeyboardInterrupt
        expected = {ALICE.uid: SIZE} if killed == "after" else {}
        assert held_open.of_users(node.cache.held) == expected
        node.cache.delete_evicted()
        assert held_open.of_users(node.cache.held) == {ALICE.uid: SIZE}
    assert held_open.of_users(node.cache.held) == {}


def test_who_may_not_ask_reads_what_was_noted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service that users ask has no capability."""
    path = node.staged(1)
    key = node.identity(path).key
    with opened(node.cache.image(key)):
        evicted(node, key)

    def refused(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as asked:
        asked.setattr(handles, "facts", refused)
        assert inventory.held(node.cache) == Taken(1, SIZE)
    assert inventory.held(node.cache) == Taken()


def test_file_system_without_handles_holds_nothing_that_is_known(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.staged(1)
    key = node.identity(path).key
    monkeypatch.setattr(handles, "of", lambda path: None)
    with opened(node.cache.image(key)):
        evicted(node, key)
        assert inventory.held(node.cache) == Taken()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff" * 100])
def test_damaged_note_is_deleted(node: Node, damage: bytes) -> None:
    node.staged(1)
    node.cache.held.mkdir()
    (node.cache.held / "1-00").write_bytes(damage)
    assert inventory.held(node.cache) == Taken()
    assert list(node.cache.held.iterdir()) == []


def test_user_who_keeps_evicted_entries_open_has_nobody_elses_evicted(node: Node) -> None:
    """Else `max_user_share` means nothing: their entries go for each other, then the others'."""
    node.configure(
        max_size=str(40 * MIB), max_user_share="50%", low_watermark="100%", redirect="none"
    )
    theirs = [node.put(f"bob/{n}.sqsh", content(50 + n, 5 * MIB), BOB) for n in range(3)]
    for job, path in enumerate(theirs, 1):
        assert node.prolog(job, path, user=BOB).outcome.result == "copied"
        node.epilog(job)
    kept = {node.identity(path).key for path in theirs}
    said: list[tuple[str, str]] = []
    with contextlib.ExitStack() as holding:
        for number in range(8):
            path = node.put("alice/image.sqsh", content(number, 8 * MIB))
            ran = node.prolog(10 + number, path)
            said.append(ran.said)
            if ran.outcome.result == "copied":
                key = node.identity(path).key
                holding.enter_context(opened(node.cache.image(key)))
            node.epilog(10 + number)
            assert kept <= node.entries(), number
        assert said[:2] == [("copied", "")] * 2
        assert said[-1] == ("declined", "no-room")
        assert sum(evict.of_users(node.cache).values()) <= 20 * MIB
    assert node.prolog(20, path).said == ("copied", "")


def test_cache_is_not_touched_by_a_look(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert held_open.gather(cache.held) == ()
    assert list(tmp_path.iterdir()) == []
