"""Leases, plans and redirects change under one lock; who cannot have it in time changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from forestage.cache import evict
from forestage.config import Config
from forestage.stage import wait
from forestage.system import lock
from forestage.units import Amount
from node import Node


@pytest.fixture
def held_by_another(node: Node, short_locks: None) -> Iterator[None]:
    """The space lock is somebody else's."""
    node.cache.prepare(require_mount=True)
    with lock.held(node.cache.space_lock, 0):
        yield


def test_no_lease_is_taken_without_the_lock(node: Node, held_by_another: None) -> None:
    ran = node.prolog(1, node.put("alice/image.sqsh"))
    assert (ran.code, *ran.said) == (0, "failed", "busy")
    assert node.lease(1) is None


def test_no_redirect_is_laid_without_the_lock(
    node: Node, short_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Epilog that runs beside it could take it for one that nobody needs."""
    path = node.put("alice/image.sqsh")
    node.prolog(1, path)
    node.epilog(1)
    obtain = wait.obtain

    with contextlib.ExitStack() as undo:

        def then_locked(*args: object, **kwargs: object) -> object:
            found = obtain(*args, **kwargs)  # type: ignore[arg-type]
            undo.enter_context(lock.held(node.cache.space_lock, 0))
            return found

        monkeypatch.setattr(wait, "obtain", then_locked)
        ran = node.prolog(2, path)
        assert (ran.code, *ran.said) == (0, "failed", "busy")
        assert node.binds() == {}


@pytest.mark.parametrize("how", ["keys", "room", "tidy"])
def test_nothing_is_evicted_without_the_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A lease may be written just now, for the very entry that the plan takes."""
    path = node.put("alice/image.sqsh")
    key = node.prolog(1, path).outcome.key
    node.epilog(1)
    monkeypatch.setattr(lock, "SPACE_TIMEOUT", 0.05)
    tight = Config(max_size=Amount(size=300_000), low_watermark=Amount(share=0.01))
    ways: dict[str, Callable[[], tuple[str, ...]]] = {
        "keys": lambda: evict.evict_keys(node.cache, node.leases, [key]),
        "room": lambda: evict.make_room(node.cache, node.leases, tight, "/x", 200_000),
        "tidy": lambda: evict.tidy(node.cache, node.leases, tight, 0.05),
    }
    work = ways[how]
    with lock.held(node.cache.space_lock, 0), pytest.raises(lock.Busy):
        work()
    assert node.entries() == {key}
    assert work() == (key,)


def test_the_epilog_takes_no_redirect_off_without_the_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Prolog of another job may be about to count on it."""
    path = node.put("alice/image.sqsh")
    node.prolog(1, path)
    monkeypatch.setattr(lock, "SPACE_TIMEOUT", 0.05)
    with lock.held(node.cache.space_lock, 0):
        ran = node.epilog(1)
        assert (ran.code, *ran.said) == (0, "failed", "busy")
        assert set(node.binds()) == {str(path)}
