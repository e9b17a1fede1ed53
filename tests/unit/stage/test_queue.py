"""The queue of a node's copies: by the time of asking, and nobody waits for the dead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from forestage.cache.image import Image
from forestage.cache.node import Node
from forestage.cache.part import Owner, Part, Phase, boot_id
from forestage.errors import Stopped
from forestage.stage import queue
from forestage.stage.queue import STALLED_AFTER
from forestage.system import lock

Add = Callable[..., Part]
Waits = Callable[..., bool]

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
def owner(make_image: Callable[..., Image]) -> Owner:
    return Owner(1, boot_id(), make_image(), 5, "chunks", 7, since=5.0)


@pytest.fixture
def one_at_once(staging_node: Node) -> Node:
    config = msgspec.structs.replace(staging_node.config, max_copies=1)
    return msgspec.structs.replace(staging_node, config=config)


@pytest.fixture
def ahead(one_at_once: Node, owner: Owner) -> Waits:
    """Whether a stager of our key has to wait where `most` may copy at once."""

    def waits(most: int = 1) -> bool:
        config = msgspec.structs.replace(one_at_once.config, max_copies=most)
        node = msgspec.structs.replace(one_at_once, config=config)
        turns = Turns()
        with contextlib.suppress(Stopped):
            queue.wait_turn(node, KEY, owner, turns)  # type: ignore[arg-type]
        return turns.waited > 0

    return waits


@pytest.fixture
def others(staging_node: Node, owner: Owner) -> Iterator[Add]:
    """Adds another stager's part, and holds its lock where the stager lives."""
    held = contextlib.ExitStack()

    def adding(
        key: str,
        since: float | None,
        boot: str = "",
        alive: bool = True,
        phase: Phase = "queued",
    ) -> Part:
        part = Part(staging_node.cache.part_dir(key))
        part.directory.mkdir()
        if since is not None:
            boot = boot or owner.boot
            part.write_owner(msgspec.structs.replace(owner, since=since, boot=boot, phase=phase))
        if alive:
            held.enter_context(lock.held(staging_node.cache.key_lock(key), 0))
        return part

    with held:
        yield adding


@pytest.mark.parametrize(
    ("key", "since", "boot", "alive", "waits"),
    [
        pytest.param("a", 1.0, "", True, True, id="asked before"),
        pytest.param("a", 9.0, "", True, False, id="asked after"),
        pytest.param("a", 5.0, "", True, True, id="at once, before by name"),
        pytest.param("z", 5.0, "", True, False, id="at once, after by name"),
        pytest.param("a", 1.0, "", False, False, id="dead"),
        pytest.param("a", 1.0, "older", True, False, id="of another boot, whose clock is another"),
        pytest.param("a", None, "", True, False, id="not claimed yet"),
        pytest.param(KEY, 1.0, "", True, False, id="ourselves"),
    ],
)
def test_queue_is_in_the_order_of_asking(
    ahead: Waits, others: Add, key: str, since: float | None, boot: str, alive: bool, waits: bool
) -> None:
    others(key, since, boot, alive)
    assert ahead() is waits


@pytest.mark.parametrize(("most", "waits"), [(1, True), (2, True), (3, False), (4, False)])
def test_copies_at_once_are_limited_by_max_copies(
    ahead: Waits, others: Add, most: int, waits: bool
) -> None:
    others("a", 1.0)
    others("b", 2.0)
    assert ahead(most) is waits


@pytest.mark.parametrize(
    ("phase", "still", "waits"),
    [
        ("copying", STALLED_AFTER + 1, False),
        ("copying", STALLED_AFTER - 1, True),
        ("queued", STALLED_AFTER + 1, True),
    ],
)
def test_stalled_copy_loses_its_place(
    staging_node: Node,
    ahead: Waits,
    others: Add,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    still: float,
    waits: bool,
) -> None:
    part = others("a", 1.0, phase=phase)
    part.map.touch()
    monkeypatch.setattr(staging_node.clock, "wall", lambda: part.map.stat().st_mtime + still)
    assert ahead() is waits


def test_turn_comes_when_the_copies_ahead_have_ended(
    one_at_once: Node, owner: Owner, others: Add
) -> None:
    parts = [others("a", 1.0), others("b", 2.0)]
    turns = Turns(then=lambda: parts.pop().record.unlink())
    queue.wait_turn(one_at_once, KEY, owner, turns)  # type: ignore[arg-type]
    assert (turns.waited, parts) == (2, [])


def test_stopped_copy_leaves_the_queue(one_at_once: Node, owner: Owner, others: Add) -> None:
    others("a", 1.0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        queue.wait_turn(one_at_once, KEY, owner, stop)
