"""Who waits for a copy, who gives up, who is killed: the copy goes on, once, in its turn."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from fault import (
    CHUNKS,
    Beside,
    Gate,
    Points,
    Until,
    image,
    kill_stager,
    missing,
    served,
)

from forestage.cache.part import Part, PartRecord
from forestage.stage import copy_queue
from node import ALICE, BOB, Node, until


@pytest.mark.parametrize("point", ["claimed", "reserved", "chunk", "copied", "checked"])
def test_prolog_killed_while_waiting_does_not_stop_the_copy(
    node: Node, points: Points, gate: Gate, point: str
) -> None:
    path = node.put("alice/image.sqsh", image())
    points.at(point, gate)
    hook = Beside(lambda: node.prolog(1, path))
    until(lambda: points.count(point), "the stager")

    hook.kill()

    assert node.shows_source(path)
    gate.open()
    until(node.entries, "the copy to go on and publish")
    assert node.epilog(1).code == 0
    assert node.lease(1) is None
    assert node.prolog(2, path).outcome.result == "hit"
    assert served(node, path, image())
    assert points.count("chunk") == CHUNKS


def test_copy_continues_after_the_hooks_deadline(node: Node, points: Points, gate: Gate) -> None:
    path = node.put("alice/image.sqsh", image())
    points.at("chunk", gate, nth=None)
    ran = node.prolog(1, path, clock=Until(lambda: points.count("chunk")))
    assert (ran.code, *ran.said) == (0, "declined", "deadline")
    assert node.shows_source(path)
    assert node.binds() == {}
    gate.open()
    until(node.entries, "the copy to go on and publish")
    assert node.prolog(2, path).outcome.result in ("hit", "joined")
    assert served(node, path, image())


@pytest.mark.parametrize("most", [1, 2])
def test_at_most_max_copies_run_at_once_and_queued_copies_run_in_order(
    node: Node, points: Points, gate: Gate, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(
        copy_queue, "STALLED_AFTER", 3600.0
    )  # who waits at the gate keeps its place
    node.configure(max_copies=most, max_user_share="100%")
    paths = [node.put(f"alice/{n}.sqsh", image(n)) for n in range(5)]
    points.at("reserved", gate, nth=None)
    hooks = []
    for n, path in enumerate(paths):
        hooks.append(Beside(lambda job=n, path=path: node.prolog(job, path)))
        until(lambda n=n: points.count("claimed") == n + 1, "the stager to stand in line")
    until(lambda: points.count("reserved") == most, "the first to get their turn")
    pids = [owner.pid for path in paths if (owner := _owner(node, path))]

    gate.open()

    assert [hook.ran().outcome.result for hook in hooks] == ["copied"] * 5
    assert all(path.read_bytes() == image(n) for n, path in enumerate(paths))
    passed = points.passed()
    order = [pid for name, pid in passed if name == "reserved"]
    assert set(order[:most]) == set(pids[:most])
    assert most > 1 or order == pids
    copying: set[int] = set()
    for name, pid in passed:
        copying |= {pid} if name == "reserved" else set()
        assert len(copying) <= most
        # Not "published": by then the next has seen that its place is free.
        copying -= {pid} if name == "checked" else set()


def _owner(node: Node, path: Path) -> PartRecord | None:
    return node.cache.part(node.identity(path).key).find_record()


def test_copy_of_a_job_that_has_ended_yields_its_slot_to_a_needed_copy(
    node: Node, points: Points
) -> None:
    node.configure(max_copies=4, threads=1, bandwidth="1K")  # after a first chunk, hours
    paths = [node.put(f"alice/{n}.sqsh", image(n)) for n in range(4)]
    for n, path in enumerate(paths):
        ran = node.prolog(n, path, clock=Until(lambda n=n: points.count("chunk") > n))
        assert (ran.code, *ran.said) == (0, "declined", "deadline")
        node.epilog(n)
    small = node.put("bob/small.sqsh", image(9, 512 * 1024))

    assert node.prolog(9, small, user=BOB).outcome.result == "copied"

    (stopped,) = [one for one in node.outcomes("stager") if one.reason == "stopped"]
    keys = [node.identity(path).key for path in paths]
    assert missing(node, stopped.key) == CHUNKS - 1  # what it had stays
    left = [key for key in keys if key != stopped.key]
    assert [key for key in left if node.is_idle(key)] == []
    for path in paths:
        if owner := node.cache.find_stager(node.identity(path).key):
            os.kill(owner.pid, signal.SIGTERM)
    until(lambda: all(node.is_idle(key) for key in keys), "the stagers' end")


def test_two_stagers_queued_at_the_same_moment_copy_in_turn(
    node: Node, points: Points, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that asked first is slow to say so; the second must not pass it unseen."""
    monkeypatch.setattr(
        copy_queue, "STALLED_AFTER", 3600.0
    )  # who waits at the gate keeps its place
    node.configure(max_copies=1)
    first, second = (node.put(f"alice/{n}.sqsh", image(n)) for n in (1, 2))
    slow = node.identity(first).key
    write = Part.write_record
    asked, go_on = tmp_path / "asked", tmp_path / "go-on"

    def late(part: Part, owner: PartRecord) -> None:
        if part.directory.name == slow and owner.phase == "queued":
            asked.touch()
            until(go_on.exists, "the second's chance to be over")
        write(part, owner)

    monkeypatch.setattr(Part, "write_record", late)
    points.at("reserved", gate, nth=None)
    hooks = [Beside(lambda: node.prolog(1, first))]
    until(asked.exists, "the first to stand in line")
    hooks.append(Beside(lambda: node.prolog(2, second)))
    # For what must not happen; it takes a second stager a fifth of that to get its turn.
    time.sleep(1)
    go_on.touch()
    until(lambda: points.count("claimed") == 2, "both to stand in line")
    until(lambda: points.count("reserved"), "one to get its turn")
    time.sleep(0.4)  # the gate is closed, so that one has the only turn
    turns = points.count("reserved")
    gate.open()
    assert [hook.ran().outcome.result for hook in hooks] == ["copied", "copied"]
    assert turns == 1


def test_twenty_hooks_for_one_image_share_one_copy(node: Node, points: Points) -> None:
    path = node.put("alice/image.sqsh", image())
    users = (ALICE, BOB)
    hooks = [
        Beside(lambda job=job: node.prolog(job, path, user=users[job % 2])) for job in range(20)
    ]
    rans = [hook.ran() for hook in hooks]
    assert [ran.code for ran in rans] == [0] * 20
    results = [ran.outcome.result for ran in rans]
    assert results.count("copied") == 1
    assert set(results) <= {"copied", "joined", "hit"}
    assert sorted({ran.outcome.redirect for ran in rans}) == ["kept", "mounted"]
    assert [outcome.result for outcome in node.outcomes("stager")] == ["copied"]
    assert points.count("chunk") == CHUNKS
    assert served(node, path, image())
    for job in range(20):
        assert list(node.binds()) == [str(path)]
        assert node.epilog(job).code == 0
    assert node.binds() == {}
    assert node.parts() == []


def test_twenty_hooks_get_their_copy_though_its_stager_is_killed(
    node: Node, points: Points
) -> None:
    path = node.put("alice/image.sqsh", image())
    points.at("chunk", kill_stager, nth=3)
    points.at("checked", kill_stager)
    hooks = [Beside(lambda job=job: node.prolog(job, path)) for job in range(20)]
    rans = [hook.ran() for hook in hooks]
    assert {ran.outcome.result for ran in rans} <= {"copied", "joined", "hit"}
    assert points.count("published") == 1
    assert served(node, path, image())
