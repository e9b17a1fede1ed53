"""The fixtures of this suite: its own, and those of all hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from forestage.features.peers import auth, connection, peer_copy, protocol
from node import HANGS
from peering import Answering, FakeService, send_first_chunk
from suites import fixtures_of

globals().update(fixtures_of("hooks"))

LIMITS = (
    (auth, "MUNGE_TIMEOUT"),
    (connection, "CONNECT_TIMEOUT"),
    (connection, "SILENCE_TIMEOUT"),
    (protocol, "HANDSHAKE_TIMEOUT"),
)


@pytest.fixture(autouse=True)
def patient_with_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds or minutes is no dead peer."""
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 600.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths, until there is a connection and a session."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.3)
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", 0.5)


def _set_policy(monkeypatch: pytest.MonkeyPatch, **how: float) -> None:
    policy = peer_copy.make_policy
    monkeypatch.setattr(
        peer_copy, "make_policy", lambda *of: msgspec.structs.replace(policy(*of), **how)
    )


@pytest.fixture
def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source on a tmpfs is faster than any first connection: a copy first hears its peers."""
    _set_policy(monkeypatch, max_probe_reads=0, probe=HANGS, first_answer_wait=HANGS)


@pytest.fixture
def left_to_peers(monkeypatch: pytest.MonkeyPatch, read_late: None) -> None:
    """Nor reads a copy in others' stead, however long a chunk takes on a busy machine."""
    _set_policy(monkeypatch, grace=HANGS)


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeService]]:
    made: list[FakeService] = []

    def make(
        on_chunk: Answering = send_first_chunk,
        shared: bytes = b"k" * 64,
    ) -> FakeService:
        made.append(FakeService(on_chunk, shared))
        return made[-1]

    yield make
    for one in made:
        one.end()
