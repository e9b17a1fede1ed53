"""Sessions: nothing is asked twice, nothing is kept for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage import sessions
from forestage.credential import Claim
from forestage.sessions import IDLE, WINDOW, Session, Sessions


def session(now: float = 0.0) -> Session:
    return Session(Claim("k", "c", b"s"), "10.0.0.1", now)


@given(st.lists(st.integers(0, 50)))
def test_each_number_is_new_once_in_whatever_order_they_come(counters: list[int]) -> None:
    one = session()
    seen: set[int] = set()
    for counter in counters:
        assert one.is_new(counter) == (counter not in seen)
        seen.add(counter)


def test_a_number_too_far_behind_counts_as_used() -> None:
    one = session()
    assert one.is_new(WINDOW)
    assert not one.is_new(0)
    assert one.is_new(1)


def test_a_huge_number_costs_no_memory_and_hides_no_old_one() -> None:
    one = session()
    assert one.is_new(3)
    assert one.is_new(10**18)
    assert one._seen.bit_length() <= WINDOW
    assert not one.is_new(3)
    assert not one.is_new(10**18)


def test_a_session_that_is_used_stays_one_that_is_not_goes() -> None:
    held = Sessions()
    idle, used = session(0.0), session(0.0)
    for one in (idle, used):
        assert held.add(one) == []
    assert held.find(used.id, IDLE) is used
    assert held.expire(IDLE + 1) == [idle]
    assert held.find(idle.id, IDLE + 1) is None
    assert held.find(used.id, IDLE + 1) is used


def test_there_are_never_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    held = Sessions()
    three = [session(float(n)) for n in range(3)]
    assert [held.add(one) for one in three] == [[], [], [three[0]]]
    assert held.end() == three[1:]
    assert len(held) == 0


def test_a_line_about_a_session_says_what_it_was_given() -> None:
    one = session(2.0)
    one.chunks, one.bytes, one.used = 2, 30, 5.5
    assert one.told() == "client=10.0.0.1 key=k chunks=2 bytes=30 seconds=3.5"


def test_names_cannot_be_guessed() -> None:
    names = {session().id for _ in range(100)}
    assert (len(names), {len(name) for name in names}) == (100, {32})
