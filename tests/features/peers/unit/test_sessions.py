"""Sessions and connections of clients: nothing is answered twice, nothing is kept for ever."""

from __future__ import annotations

import asyncio
import os
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.features.peers import sessions
from forestage.features.peers.auth import BadCredential, VerifiedClaim
from forestage.features.peers.sessions import (
    COUNTER_WINDOW,
    PROOF_TIMEOUT,
    SESSION_IDLE,
    ClientSession,
    SessionTable,
    UnprovenConnections,
)


def session(now: float = 0.0, secret: bytes | None = None) -> ClientSession:
    return ClientSession(VerifiedClaim("k", secret or os.urandom(32)), "10.0.0.1", now)


@given(st.lists(st.integers(0, 50)))
def test_session_counter_is_new_once_in_any_order(counters: list[int]) -> None:
    one = session()
    seen: set[int] = set()
    for counter in counters:
        assert one.try_use_counter(counter) == (counter not in seen)
        seen.add(counter)


def test_huge_session_counter_keeps_the_window_small_and_expires_older_counters() -> None:
    one = session()
    assert one.try_use_counter(COUNTER_WINDOW)
    assert not one.try_use_counter(0)
    assert one.try_use_counter(1)
    assert one.try_use_counter(10**18)
    assert one._seen.bit_length() <= COUNTER_WINDOW
    assert not one.try_use_counter(3)


def test_idle_session_expires_with_a_log_line_and_a_used_session_stays(
    capfd: pytest.CaptureFixture[str],
) -> None:
    held = SessionTable()
    idle, used = session(0.0), session(0.0)
    for one in (idle, used):
        held.add(one)
    idle.chunks, idle.bytes, idle.used = 2, 30, 3.5
    held.touch(used, SESSION_IDLE)
    assert held.find(idle.id) is idle  # who only names it does not keep it
    held.end_expired(SESSION_IDLE + 4)
    assert held.find(idle.id) is None
    assert held.find(used.id) is used
    assert capfd.readouterr().err == (
        "forestage: peer client=10.0.0.1 key=k chunks=2 bytes=30 seconds=3.5\n"
    )


def test_second_session_with_the_same_secret_is_refused() -> None:
    held = SessionTable()
    held.add(session(secret=b"s"))
    with pytest.raises(BadCredential):
        held.add(session(secret=b"s"))
    assert len(held) == 1
    held.end_sessions()
    held.add(session(secret=b"s"))


def test_least_recently_used_peer_session_ends_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    held = SessionTable()
    three = [session(float(n)) for n in range(3)]
    for one in three:
        held.add(one)
    assert [held.find(one.id) for one in three] == [None, *three[1:]]


class Line:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


def made(held: UnprovenConnections, *names: str, now: float = 0.0) -> dict[str, Line]:
    lines = {name: Line() for name in names}
    for name, line in lines.items():
        held.add(name, cast(asyncio.Transport, line), now)
    return lines


def cut(lines: dict[str, Line]) -> set[str]:
    return {name for name, line in lines.items() if line.aborted}


def test_peer_connection_unproven_for_too_long_is_closed() -> None:
    held = UnprovenConnections()
    lines = made(held, "early", "known", "gone") | made(held, "late", now=1.0)
    for name in ("known", "gone", "never seen"):
        held.discard(name)
    held.cut_expired(PROOF_TIMEOUT)
    assert cut(lines) == set()
    held.cut_expired(PROOF_TIMEOUT + 1)
    assert (cut(lines), len(held)) == ({"early"}, 1)


def test_oldest_unproven_connections_are_closed_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNPROVEN", 2)
    held = UnprovenConnections()
    lines = made(held, "known")
    held.discard("known")
    lines |= made(held, "a", "b", "c", "d")
    assert cut(lines) == {"a", "b"}
