"""The clock is set back or forth by an hour: nobody waits for it to come round again."""

from __future__ import annotations

import pytest
from fault import Points, image, kill_stager, served

from forestage.clock import Clock
from node import Later, Node, content

HOUR = 3600.0


class Jumping(Clock):
    """The real clock, set by `seconds` after it was read `reads` times; in each process anew."""

    def __init__(self, seconds: float, reads: int) -> None:
        self.seconds = seconds
        self.reads = reads

    def wall(self) -> float:
        self.reads -= 1
        return super().wall() + (self.seconds if self.reads < 0 else 0.0)


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
@pytest.mark.parametrize("reads", range(7))
def test_clock_jump_during_a_hook_changes_neither_outcome_nor_bytes(
    node: Node, seconds: float, reads: int
) -> None:
    path = node.put("alice/image.sqsh", image())
    clock = Jumping(seconds, reads)
    assert node.prolog(1, path, clock=clock).outcome.result == "copied"
    assert served(node, path, image())
    assert node.prolog(2, path, clock=clock).outcome.result == "hit"
    for job in (1, 2):
        assert node.epilog(job, clock).said == ("released", "")
    assert node.binds() == {}


def test_source_with_times_in_the_future_is_copied_without_waiting(node: Node) -> None:
    """The file server's clock is another one; waiting until ours is there would take an hour."""
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path, clock=Later(-HOUR)).outcome.result == "copied"


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_killed_copy_is_resumed_after_a_clock_jump(
    node: Node, points: Points, seconds: float
) -> None:
    node.configure(threads=1)
    path = node.put("alice/image.sqsh", image())
    points.at("chunk", kill_stager, nth=3)
    points.at("claimed", kill_stager, nth=2)
    points.at("claimed", kill_stager, nth=3)
    assert node.prolog(1, path).said == ("failed", "copy")
    before = points.count("chunk")
    assert node.prolog(2, path, clock=Later(seconds)).outcome.result == "copied"
    assert points.count("chunk") - before == 3
    assert served(node, path, image())


def test_leases_and_the_order_of_use_hold_after_the_clock_jumps_back(node: Node) -> None:
    node.configure(max_size="1400K")  # five of 256 KiB

    def stage(job: int, name: str, clock: Clock) -> str:
        ran = node.prolog(job, node.put(name, content(job)), clock=clock)
        assert ran.outcome.result == "copied"
        return ran.outcome.key

    leased = stage(1, "alice/leased.sqsh", Later(-HOUR - 100))  # the oldest by any clock
    keys = {}
    for job, (name, when) in enumerate(
        [("before", 0.0), ("first", -HOUR), ("second", -HOUR + 10), ("third", -HOUR + 20)], 2
    ):
        keys[name] = stage(job, f"alice/{name}.sqsh", Later(when))
        node.epilog(job, Later(when))
    # A use after the jump counts, though it looks older than those of before.
    node.prolog(9, node.shared / "alice/first.sqsh", clock=Later(-HOUR + 30))
    node.epilog(9, Later(-HOUR + 30))

    gone = []
    for job in (11, 12):
        before = node.entries()
        stage(job, f"alice/{job}.sqsh", Later(-HOUR + 40 + job))
        gone += [name for name, key in keys.items() if key in before - node.entries()]

    assert gone == ["second", "third"]
    assert leased in node.entries()
