"""Sessions and connections of clients: nothing is answered twice, nothing is kept for ever."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.peers import sessions
from forestage.peers.auth import Claim, Refused
from forestage.peers.sessions import (
    CONNECTION_IDLE,
    SESSION_IDLE,
    UNPROVEN,
    WINDOW,
    Connections,
    Session,
    Sessions,
)


def session(now: float = 0.0, secret: bytes | None = None) -> Session:
    return Session(Claim("k", secret or os.urandom(32)), "10.0.0.1", now)


@given(st.lists(st.integers(0, 50)))
def test_request_number_is_new_once_in_any_order(counters: list[int]) -> None:
    one = session()
    seen: set[int] = set()
    for counter in counters:
        assert one.is_new(counter) == (counter not in seen)
        seen.add(counter)


def test_request_number_behind_the_window_counts_as_used() -> None:
    one = session()
    assert one.is_new(WINDOW)
    assert not one.is_new(0)
    assert one.is_new(1)


def test_huge_request_number_costs_no_memory() -> None:
    one = session()
    assert one.is_new(3)
    assert one.is_new(10**18)
    assert one._seen.bit_length() <= WINDOW
    assert not one.is_new(3)
    assert not one.is_new(10**18)


def test_idle_session_ends_and_used_one_stays() -> None:
    held = Sessions()
    idle, used = session(0.0), session(0.0)
    for one in (idle, used):
        assert held.add(one) == []
    assert held.find(used.id, SESSION_IDLE) is used
    assert held.expire(SESSION_IDLE + 1) == [idle]
    assert held.find(idle.id, SESSION_IDLE + 1) is None
    assert held.find(used.id, SESSION_IDLE + 1) is used


def test_secret_used_again_opens_no_second_session() -> None:
    held = Sessions()
    held.add(session(secret=b"s"))
    with pytest.raises(Refused):
        held.add(session(secret=b"s"))
    assert len(held) == 1
    held.expire(SESSION_IDLE + 1)
    assert held.add(session(secret=b"s")) == []
    held.end()
    assert held.add(session(secret=b"s")) == []


def test_too_many_sessions_end_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    held = Sessions()
    three = [session(float(n)) for n in range(3)]
    assert [held.add(one) for one in three] == [[], [], [three[0]]]
    assert held.end() == three[1:]
    assert len(held) == 0


def test_session_summary_has_what_was_uploaded() -> None:
    one = session(2.0)
    one.chunks, one.bytes, one.used = 2, 30, 5.5
    assert one.summary() == "client=10.0.0.1 key=k chunks=2 bytes=30 seconds=3.5"


def test_session_names_are_random() -> None:
    names = {session().id for _ in range(100)}
    assert (len(names), {len(name) for name in names}) == (100, {32})


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


def test_unproven_connection_is_cut_even_when_busy(held: Connections, now: Now) -> None:
    lines = made(held, "idle", "busy", "known")
    held.proven("known")
    with held.busy("busy"):
        now.time = UNPROVEN
        held.sweep()
        assert cut(lines) == set()
        now.time = UNPROVEN + 1
        held.sweep()
        assert cut(lines) == {"idle", "busy"}


def test_requests_without_proof_gain_no_time(held: Connections, now: Now) -> None:
    lines = made(held, "talks")
    for _ in range(4):
        now.time += UNPROVEN / 3
        with held.busy("talks"):
            pass
    held.sweep()
    assert cut(lines) == {"talks"}


def test_proven_connection_is_cut_only_when_idle(held: Connections, now: Now) -> None:
    lines = made(held, "idle", "works", "worked")
    for name in lines:
        held.proven(name)
    with held.busy("works"):
        now.time = CONNECTION_IDLE - 1
        with held.busy("worked"):
            pass
        now.time = CONNECTION_IDLE + 1
        held.sweep()
    assert cut(lines) == {"idle"}


def test_too_many_unproven_connections_cut_the_oldest(
    held: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNPROVEN", 2)
    lines = made(held, "known")
    held.proven("known")
    lines |= made(held, "a", "b", "c", "d")
    assert cut(lines) == {"a", "b"}


def test_lost_connection_makes_room(held: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_UNPROVEN", 1)
    lines = made(held, "a")
    held.lost("a")
    lines |= made(held, "b")
    assert (cut(lines), len(held)) == (set(), 1)


def test_connection_lost_while_busy_is_forgotten(held: Connections) -> None:
    made(held, "a")
    with held.busy("a"):
        held.lost("a")
        held.proven("a")
    with held.busy("never seen"):
        pass
    assert len(held) == 0
