"""The source of a read-through file gives errors, or changes: no byte that it would not give."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from far import Far
from fault import MIB, source_bytes

from forestage.errors import Declined
from forestage.views.through import keeper, keeper_process
from node import HANGS, Node, children_left, comm, until
from through import Aside, Copy, Shown, Through, here, opened, read_fresh, task


@pytest.fixture
def place(node: Node) -> Path:
    """Where a test has the file shown, so that the source's own path is still its own."""
    file = node.nvme / "place"
    file.touch()
    return file


def with_part(shown: Shown, at: Path | None = None, path: Path | None = None) -> Through:
    """A copy of other bytes, which the file shows by now; who reads those reads the copy."""
    through = shown(path, at)
    wrong = Copy(through, source_bytes()).bring_marked()
    until(lambda: read_fresh(through.at) == wrong, "the part to be found")
    return through


def test_source_error_fails_only_the_read_that_met_the_error(
    shown: Shown, far: Far, place: Path
) -> None:
    path = far.put("image.sqsh", source_bytes())
    through = shown(path, place)
    Copy(through, source_bytes()).bring(0, 4 * MIB, source_bytes(8)[: 4 * MIB])
    until(lambda: read_fresh(place, 0, 4096) == source_bytes(8)[:4096], "the part to be found")
    far.behaves(squash=2)
    with pytest.raises(PermissionError):
        read_fresh(place, 6 * MIB, 4096)
    assert read_fresh(place, MIB, 4096) == source_bytes(8)[MIB : MIB + 4096]
    far.behaves()
    assert read_fresh(place) == source_bytes(8)[: 4 * MIB] + source_bytes()[4 * MIB :]


def test_source_that_root_may_not_read_is_not_read_through(
    node: Node, shown: Shown, far: Far
) -> None:
    path = far.put("image.sqsh", source_bytes())
    far.behaves(squash=2)
    with pytest.raises(Declined) as declined:
        shown(path, lay=False)
    assert declined.value.reason == "no-through"
    far.behaves()


def test_source_that_hangs_from_the_start_leaves_a_single_keeper_and_no_server(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps come: what hangs with it takes memory until it answers."""
    node.cache.prepare(require_mount=False)
    asked = task(here(node), opened(far.put("image.sqsh", source_bytes())))
    far.behaves(reads=-1, short=MIB)

    class Hurried:
        """The first keeper's time is over once something of it hangs at the source.

        What is ended before it has read hangs nowhere, and leaves nothing.
        """

        sleep = time.sleep

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 2 * HANGS * bool(far.calls()["read"])

    monkeypatch.setattr(keeper_process, "time", Hurried)
    for start in (HANGS, 1.0, 1.0):
        monkeypatch.setattr(keeper, "START", start)
        with pytest.raises(Declined, match="does not answer") as declined:
            keeper.start_keeper(asked)
        assert declined.value.reason == "no-through"

    def left() -> list[str]:
        return sorted(comm(pid) for pid in children_left() if comm(pid) != "farfs")

    until(lambda: left() == [keeper.PROCESS_NAME], "one keeper to be left")
    far.behaves()
    until(lambda: left() == [], "its end")
    assert keeper.list_keepers(node.places.through) == []
    asked.opened.close()


def write(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


def test_source_changed_in_place_is_read_with_its_new_bytes_also_after_a_server_restart(
    node: Node, shown: Shown
) -> None:
    through = with_part(shown)
    server = node.server / "alice/image.sqsh"
    for data in (source_bytes(8), source_bytes()):
        node.elsewhere(lambda data=data: write(server, data))
        # Also what the kernel has in its cache.
        until(lambda data=data: through.path.read_bytes() == data, "the change to be seen")
        assert read_fresh(through.path) == data
        through.kill_server()
        assert read_fresh(through.path) == data


def test_changed_source_without_readable_attributes_is_not_served_from_the_copy(
    shown: Shown, far: Far, place: Path
) -> None:
    through = with_part(shown, place, far.put("image.sqsh", source_bytes()))
    write(far.folder / "image.sqsh", source_bytes(8))
    until(lambda: read_fresh(place) == source_bytes(8), "the change to be seen")
    far.die()
    through.kill_server()
    through.server()
    with pytest.raises(OSError, match="not connected"):
        read_fresh(place)


def test_replaced_source_is_read_as_the_old_file_and_not_from_the_copy(
    node: Node, shown: Shown, place: Path
) -> None:
    through = with_part(shown, place)
    node.put("alice/new", source_bytes(8))
    os.replace(node.server / "alice/new", node.server / "alice/image.sqsh")
    until(lambda: read_fresh(place) == source_bytes(), "the change to be seen")
    through.kill_server()
    assert read_fresh(place) == source_bytes()


def test_read_under_way_while_the_source_is_replaced_returns_the_old_files_bytes(
    shown: Shown, far: Far, place: Path
) -> None:
    """A FUSE that knows files by their paths shows an open one with the new one's size."""
    path = far.put("image.sqsh", source_bytes())
    shown(path, place)
    far.behaves(hold=1)

    def read() -> None:
        assert read_fresh(place, 2 * MIB, MIB) == source_bytes()[2 * MIB : 3 * MIB]

    reader = Aside(read)
    until(lambda: far.calls()["held"] > 0, "a read to be held")
    new = far.folder / "new"
    new.write_bytes(b"other")
    new.replace(far.folder / "image.sqsh")
    before = far.calls()["getattr"]
    looker = Aside(path.stat)
    until(lambda: far.calls()["getattr"] > before and looker.waits(), "a look that waits for it")
    far.behaves()
    assert (looker.ended(), reader.ended()) == (0, 0)


@pytest.mark.parametrize("size", [5 * MIB, 5 * MIB + 4095, 0])
def test_truncated_source_ends_at_its_new_size_without_zeros(
    node: Node, shown: Shown, size: int
) -> None:
    through = with_part(shown)
    os.truncate(node.server / "alice/image.sqsh", size)
    until(lambda: read_fresh(through.path) == source_bytes()[:size], "the change to be seen")
    assert read_fresh(through.path, size) == b""
