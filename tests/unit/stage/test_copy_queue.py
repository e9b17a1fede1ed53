"""The queue of a node's copies: those that jobs need first, and nobody waits for the dead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.cache.part import Part, PartRecord, boot_id
from forestage.cache.source_image import SourceImage
from forestage.errors import CopyStopped
from forestage.stage import copy_queue
from forestage.stage.copy_queue import (
    STALLED_AFTER,
    CopyNeed,
    CopyTurn,
    QueuedCopy,
    choose_turn,
    estimate_wait,
    order_waiting,
)
from forestage.system import lock
from forestage.system.as_user import User

Add = Callable[..., Part]
Waits = Callable[..., bool]

ALICE, BOB = 1, 2


def waits(key: str, since: float, need: CopyNeed = "later", uid: int = ALICE) -> QueuedCopy:
    return QueuedCopy(key, uid, since, need)


def runs(key: str, since: float = 0.0, need: CopyNeed = "later", uid: int = ALICE) -> QueuedCopy:
    return QueuedCopy(key, uid, since, need, has_slot=True)


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        pytest.param([waits("b", 1), waits("a", 2)], "ba", id="earlier request first"),
        pytest.param([waits("b", 1), waits("a", 1)], "ab", id="same time: by name"),
        pytest.param(
            [waits("b", 1), waits("a", 2, "now")], "ab", id="needed now before needed later"
        ),
        pytest.param([waits("b", 1, "none"), waits("a", 2)], "ab", id="unneeded last"),
        pytest.param(
            [runs("x"), waits("b", 1), waits("a", 2, uid=BOB)], "ab", id="fewer under way"
        ),
        pytest.param(
            [waits("c", 1), waits("d", 2), waits("b", 3, uid=BOB)], "cbd", id="users in turn"
        ),
        pytest.param(
            [runs("x"), waits("b", 1, "now"), waits("a", 2, uid=BOB)], "ba", id="need before user"
        ),
    ],
)
def test_waiting_copies_are_ordered_by_need_then_user_then_time(
    copies: list[QueuedCopy], expected: str
) -> None:
    assert "".join(copy.key for copy in order_waiting(copies)) == expected


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        pytest.param([waits("me", 1)], "go", id="alone"),
        pytest.param([runs("x"), waits("me", 1)], "go", id="a slot is free"),
        pytest.param([runs("x"), runs("y"), waits("me", 1)], "wait", id="none is free"),
        pytest.param(
            [runs("x"), waits("a", 1), waits("me", 2)], "wait", id="slot belongs to an earlier copy"
        ),
        pytest.param(
            [runs("x"), waits("a", 1, "none"), waits("me", 2)], "go", id="earlier copy is unneeded"
        ),
        pytest.param([waits("a", 1), waits("b", 1), waits("me", 0, "none")], "wait", id="unneeded"),
        pytest.param([runs("x"), runs("y", need="none"), waits("me", 1)], "wait", id="not yet"),
        pytest.param([runs("x"), runs("y"), runs("z"), waits("me", 1)], "wait", id="too many"),
        pytest.param(
            [runs("me"), runs("x"), waits("a", 1, "now")], "go", id="needed: keeps running"
        ),
        pytest.param([runs("me", need="none"), waits("a", 1)], "go", id="another slot is free"),
        pytest.param([runs("me", need="none"), runs("x")], "go", id="no copy waits"),
        pytest.param([runs("me", need="none"), runs("x"), waits("a", 1)], "stop", id="yields"),
        pytest.param(
            [runs("me", need="none"), runs("x"), waits("a", 1, "none")],
            "go",
            id="does not yield to an unneeded copy",
        ),
        pytest.param(
            [runs("me", 1, "none"), runs("x", 2, "none"), waits("a", 3)], "go", id="the last does"
        ),
        pytest.param(
            [runs("me", 1, "none"), runs("x", 2, "none"), waits("a", 3), waits("b", 4)],
            "stop",
            id="both do",
        ),
    ],
)
def test_turn_of_a_copy_with_two_slots_is_run_wait_or_stop(
    copies: list[QueuedCopy], expected: CopyTurn
) -> None:
    assert choose_turn("me", copies, 2, 2) == expected


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        pytest.param([runs("x"), waits("me", 1)], "go", id="within the share"),
        pytest.param(
            [runs("x"), runs("y"), waits("me", 1)], "wait", id="above the share, slots free"
        ),
        pytest.param([runs("x"), runs("y"), waits("me", 1, uid=BOB)], "go", id="another user"),
        pytest.param([runs("x"), waits("a", 1), waits("me", 2)], "wait", id="the first of two"),
        pytest.param(
            [runs("x"), runs("y"), waits("a", 1, "now"), waits("me", 2, uid=BOB)], "go", id="passes"
        ),
        pytest.param(
            [runs("x"), runs("y"), waits("me", 1, "none")], "go", id="unneeded: counts for no user"
        ),
        pytest.param(
            [runs("x", need="none"), runs("y", need="none"), waits("me", 1)],
            "go",
            id="unneeded ones are no share",
        ),
        pytest.param(
            [runs("me", need="none", uid=BOB), runs("w"), runs("x"), runs("y"), waits("a", 1)],
            "go",
            id="does not yield to a user above the share",
        ),
        pytest.param(
            [runs("me", need="none"), runs("w"), runs("x"), runs("y"), waits("a", 1, uid=BOB)],
            "stop",
            id="yields to a user within the share",
        ),
    ],
)
def test_copies_of_one_users_jobs_get_two_of_four_slots(
    copies: list[QueuedCopy], expected: CopyTurn
) -> None:
    assert choose_turn("me", copies, 4, 2) == expected


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        pytest.param([waits("me", 1)], 0.0, id="a slot is free"),
        pytest.param([runs("x"), runs("y"), waits("me", 1)], 10.0, id="behind two"),
        pytest.param([runs("x"), runs("y"), waits("a", 1), waits("me", 2)], 30.0, id="third"),
        pytest.param(
            [runs("x"), runs("y"), waits("a", 1), waits("b", 1), waits("me", 2)], 30.0, id="fourth"
        ),
        pytest.param(
            [runs("x"), runs("y", need="none"), waits("me", 1)], 0.0, id="a running copy yields"
        ),
        pytest.param(
            [runs("x"), runs("new"), waits("me", 1)], 0.0, id="a running copy of unknown rate"
        ),
        pytest.param([runs("y", need="none"), waits("me", 1)], 0.0, id="behind no needed copy"),
    ],
)
def test_estimated_wait_for_a_slot_ends_with_the_copies_ahead_in_the_queue(
    copies: list[QueuedCopy], expected: float
) -> None:
    assert estimate_wait("me", copies, 2, 2, {"x": 30.0, "y": 10.0, "new": None}) == expected


@pytest.mark.parametrize(("uid", "expected"), [(ALICE, 10.0), (BOB, 0.0)])
def test_estimated_wait_for_a_slot_respects_the_users_share_of_slots(
    uid: int, expected: float
) -> None:
    copies = [runs("x"), runs("y"), waits("me", 1, uid=uid)]
    assert estimate_wait("me", copies, 4, 2, {"x": 30.0, "y": 10.0}) == expected


KEY = "m"  # between the others by name


class Turns:
    """Stands for the stop event: it is asked once for each time that the copy has to wait."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.waited = 0
        self.then = then

    def wait(self, seconds: float) -> bool:
        self.waited += 1
        if self.then is None:
            return True  # stopped: it would wait for ever
        self.then()
        return False


@pytest.fixture
def owner(make_image: Callable[..., SourceImage]) -> PartRecord:
    return PartRecord(1, boot_id(), make_image(), 5, "chunks", 7, since=5.0)


@pytest.fixture
def one_at_once(staging_node: Node) -> Node:
    return staging_node.with_config(max_copies=1)


@pytest.fixture
def copy_waits(one_at_once: Node, owner: PartRecord) -> Waits:
    """Whether a stager of our key has to wait where `most` may copy at once."""
    one_at_once.cache.part(KEY).write_record(owner)

    def waiting(most: int = 1) -> bool:
        config = msgspec.structs.replace(one_at_once.config, max_copies=most)
        node = msgspec.structs.replace(one_at_once, config=config)
        turns = Turns()
        with contextlib.suppress(CopyStopped):
            copy_queue.wait_for_slot(node, KEY, owner, turns)  # type: ignore[arg-type]
        return turns.waited > 0

    return waiting


@pytest.fixture
def add_copy(staging_node: Node, owner: PartRecord) -> Iterator[Add]:
    """Adds another stager's part, and holds its lock where the stager lives."""
    held = contextlib.ExitStack()

    def adding(
        key: str,
        since: float | None,
        boot: str = "",
        alive: bool = True,
        **known: object,
    ) -> Part:
        part = Part(staging_node.cache.part_dir(key))
        part.directory.mkdir(exist_ok=True)
        if since is not None:
            boot = boot or owner.boot
            part.write_record(msgspec.structs.replace(owner, since=since, boot=boot, **known))
        if alive:
            held.enter_context(lock.held(staging_node.cache.key_lock(key), 0))
        return part

    with held:
        yield adding


@pytest.fixture
def no_copy_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's clock is an hour ahead, and nothing is copied."""
    monkeypatch.setattr(copy_queue, "STALLED_AFTER", 7200.0)


@pytest.mark.parametrize(
    ("key", "since", "boot", "alive", "waits"),
    [
        pytest.param("a", 1.0, "", True, True, id="requested before"),
        pytest.param("a", 9.0, "", True, False, id="requested after"),
        pytest.param("a", 5.0, "", True, True, id="at once, before by name"),
        pytest.param("z", 5.0, "", True, False, id="at once, after by name"),
        pytest.param("a", 1.0, "", False, False, id="dead"),
        pytest.param("a", 1.0, "older", True, False, id="of another boot"),
        pytest.param("a", None, "", True, False, id="not claimed yet"),
        pytest.param(KEY, 1.0, "", True, False, id="own copy"),
    ],
)
def test_copy_waits_for_living_copies_that_were_requested_earlier(
    copy_waits: Waits,
    add_copy: Add,
    key: str,
    since: float | None,
    boot: str,
    alive: bool,
    waits: bool,
) -> None:
    add_copy(key, since, boot, alive)
    assert copy_waits() is waits


@pytest.mark.parametrize(("most", "waits"), [(1, True), (2, True), (3, False), (4, False)])
@pytest.mark.usefixtures("no_copy_stalls")
def test_simultaneous_copies_are_limited_by_max_copies(
    copy_waits: Waits, add_copy: Add, most: int, waits: bool
) -> None:
    add_copy("a", 9.0, placed=True)
    add_copy("b", 2.0)
    assert copy_waits(most) is waits


@pytest.mark.usefixtures("no_copy_stalls")
def test_copies_of_one_users_jobs_leave_half_of_the_slots_free(
    staging_node: Node, copy_waits: Waits, add_copy: Add
) -> None:
    lease(staging_node, "a", "b", KEY)
    for key in "ab":
        add_copy(key, 1.0, placed=True)
    assert copy_waits(4)
    assert not copy_waits(6)


@pytest.mark.parametrize(
    ("placed", "still", "waits"),
    [
        (True, STALLED_AFTER + 1, False),
        (True, STALLED_AFTER - 1, True),
        (False, STALLED_AFTER + 1, True),
        (True, 1 - STALLED_AFTER, True),
        (True, -3600.0, False),  # the clock was set back, and no chunk has come since
        (True, -40 * 86400.0, False),
    ],
)
def test_stalled_copy_loses_its_slot(
    staging_node: Node,
    copy_waits: Waits,
    add_copy: Add,
    monkeypatch: pytest.MonkeyPatch,
    placed: bool,
    still: float,
    waits: bool,
) -> None:
    part = add_copy("a", 1.0, placed=placed)
    part.map.touch()
    monkeypatch.setattr(staging_node.clock, "wall", lambda: part.map.stat().st_mtime + still)
    assert copy_waits() is waits


def lease(node: Node, *keys: str) -> None:
    uses = tuple(EntryUse(key) for key in keys)
    node.leases.write_lease(Lease(7, User("", 1, 1), 0.0, str(node.cache.root), uses))


def need_of(node: Node, key: str) -> CopyNeed:
    return next(copy.need for copy in copy_queue.list_live_copies(node) if copy.key == key)


def test_need_of_a_copy_follows_from_lease_keeper_socket_and_waiting_hooks(
    staging_node: Node, add_copy: Add
) -> None:
    node = staging_node
    part = add_copy("a", 1.0)
    assert need_of(node, "a") == "none"
    sock = node.places.through / "a/sock"
    sock.parent.mkdir(parents=True)
    sock.touch()
    assert need_of(node, "a") == "none"  # a keeper that was killed
    lease(node, "a")
    assert need_of(node, "a") == "now"
    sock.unlink()
    assert need_of(node, "a") == "later"
    part.mark_waited_for(node.clock.wall())
    assert need_of(node, "a") == "now"
    node.leases.drop_lease(7)
    assert need_of(node, "a") == "none"


def test_damaged_lease_counts_as_needing_any_copy(staging_node: Node, add_copy: Add) -> None:
    add_copy("a", 1.0)
    lease(staging_node, "b")
    staging_node.leases.lease_file(8).write_text("{")
    assert need_of(staging_node, "a") == "later"


def test_acquired_slot_is_recorded_in_the_part(one_at_once: Node, owner: PartRecord) -> None:
    part = one_at_once.cache.part(KEY)
    part.write_record(owner)
    taken = copy_queue.wait_for_slot(one_at_once, KEY, owner, threading.Event())
    assert (taken.placed, part.find_record()) == (True, taken)


def test_slot_is_acquired_under_the_space_lock(
    one_at_once: Node, owner: PartRecord, add_copy: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy takes the place between the first look and the lock."""
    one_at_once.cache.part(KEY).write_record(owner)
    real = lock.held

    def held(path: Path, timeout: float) -> contextlib.AbstractContextManager[None]:
        assert path == one_at_once.cache.space_lock
        monkeypatch.setattr(lock, "held", real)
        add_copy("z", 1.0, placed=True)
        return real(path, timeout)

    monkeypatch.setattr(copy_queue, "STALLED_AFTER", 7200.0)
    monkeypatch.setattr(lock, "held", held)
    with pytest.raises(CopyStopped):
        copy_queue.wait_for_slot(one_at_once, KEY, owner, Turns())  # type: ignore[arg-type]


def test_copy_gets_its_slot_when_the_copies_ahead_have_ended(
    one_at_once: Node, owner: PartRecord, add_copy: Add
) -> None:
    one_at_once.cache.part(KEY).write_record(owner)
    parts = [add_copy("a", 1.0), add_copy("b", 2.0)]
    turns = Turns(then=lambda: parts.pop().record.unlink())
    copy_queue.wait_for_slot(one_at_once, KEY, owner, turns)  # type: ignore[arg-type]
    assert (turns.waited, parts) == (2, [])


def test_stopped_copy_stops_waiting_for_a_slot(
    one_at_once: Node, owner: PartRecord, add_copy: Add
) -> None:
    add_copy("a", 1.0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(CopyStopped):
        copy_queue.wait_for_slot(one_at_once, KEY, owner, stop)


@pytest.mark.usefixtures("no_copy_stalls")
def test_running_copy_that_no_job_needs_is_stopped_for_a_waiting_copy_that_a_job_needs(
    one_at_once: Node, owner: PartRecord, add_copy: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_queue, "WATCH", 0.0)
    one_at_once.cache.part(KEY).write_record(msgspec.structs.replace(owner, placed=True))
    stop = threading.Event()
    with copy_queue.stop_when_displaced(one_at_once, KEY, stop):
        lease(one_at_once, "a")
        assert not stop.is_set()
        add_copy("a", 9.0)
        assert stop.wait(60)
