"""Nothing here is about how long the product waits for what hangs, unless a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forestage.cache import elsewhere, redirect, unmount
from forestage.hooks import epilog
from forestage.peers import auth, connection, protocol
from forestage.stage import source
from forestage.system import lock, probe

LIMITS = (
    (auth, "PATIENCE"),
    (source, "HOOK_TIMEOUT"),
    (source, "STAGER_TIMEOUT"),
    (redirect, "OVER_TIMEOUT"),
    (unmount, "TIMEOUT"),
    (elsewhere, "LOOK"),
    (epilog, "IMAGES_TIME"),
    (connection, "CONNECT"),
    (connection, "STALL"),
    (protocol, "HANDSHAKE"),
    (probe, "LIMIT"),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds or minutes is neither a dead server nor a peer."""
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 600.0)


@pytest.fixture
def short_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a lock, but for all else: a short deadline may be over before it."""
    held = lock.held
    monkeypatch.setattr(lock, "held", lambda path, timeout: held(path, min(0.05, timeout)))


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str, Callable[[], object]], None]:
    """Has something happen just before each call of a module's function."""

    def arrange(module: object, name: str, happens: Callable[[], object]) -> None:
        real = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            happens()
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    return arrange


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str, Callable[[], object]], None]:
    """Has something happen just after each call of a module's function."""

    def arrange(module: object, name: str, happens: Callable[[], object]) -> None:
        real = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            happens()
            return found

        monkeypatch.setattr(module, name, called)

    return arrange
