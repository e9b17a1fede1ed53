"""Connections: strangers are few and go soon; who is at work is let be."""

from __future__ import annotations

import pytest

from forestage import connections
from forestage.connections import IDLE, STRANGER, Connections


class Line:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


class Now:
    time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def held(now: Now) -> Connections:
    return Connections(now)


def made(held: Connections, *names: str) -> dict[str, Line]:
    lines = {name: Line() for name in names}
    for name, line in lines.items():
        held.made(name, line)
    return lines


def cut(lines: dict[str, Line]) -> set[str]:
    return {name for name, line in lines.items() if line.aborted}


def test_a_stranger_goes_after_a_while_whatever_he_does(held: Connections, now: Now) -> None:
    lines = made(held, "idle", "busy", "known")
    held.proven("known")
    with held.busy("busy"):
        now.time = STRANGER
        held.sweep()
        assert cut(lines) == set()
        now.time = STRANGER + 1
        held.sweep()
        assert cut(lines) == {"idle", "busy"}


def test_small_talk_gains_no_time(held: Connections, now: Now) -> None:
    lines = made(held, "talks")
    for _ in range(4):
        now.time += STRANGER / 3
        with held.busy("talks"):
            pass
    held.sweep()
    assert cut(lines) == {"talks"}


def test_who_is_known_goes_only_after_idling(held: Connections, now: Now) -> None:
    lines = made(held, "idle", "works", "worked")
    for name in lines:
        held.proven(name)
    with held.busy("works"):
        now.time = IDLE - 1
        with held.busy("worked"):
            pass
        now.time = IDLE + 1
        held.sweep()
    assert cut(lines) == {"idle"}


def test_of_too_many_strangers_the_oldest_goes(
    held: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 2)
    lines = made(held, "known")
    held.proven("known")
    lines |= made(held, "a", "b", "c", "d")
    assert cut(lines) == {"a", "b"}


def test_who_has_gone_makes_room(held: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 1)
    lines = made(held, "a")
    held.lost("a")
    lines |= made(held, "b")
    assert (cut(lines), len(held)) == (set(), 1)


def test_one_that_is_lost_while_it_is_served_does_no_harm(held: Connections) -> None:
    made(held, "a")
    with held.busy("a"):
        held.lost("a")
        held.proven("a")
    with held.busy("never seen"):
        pass
    assert len(held) == 0
