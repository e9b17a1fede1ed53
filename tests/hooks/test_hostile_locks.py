"""Leases, plans and redirects change under one lock; who cannot have it in time changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from forestage.cache import evict
from forestage.config import Config
from forestage.stage import copy_wait
from forestage.system import lock
from forestage.units import SizeOrShare
from node import Arrange, Node


def test_no_lease_is_written_without_the_space_lock(node: Node, short_locks: None) -> None:
    node.cache.prepare(require_mount=True)
    path = node.put("alice/image.sqsh")
    with lock.held(node.cache.space_lock, 0):
        assert node.prolog(1, path).ended == (1, "failed", "busy")
    assert node.lease(1) is None
    assert node.shows_source(path)


def test_no_redirect_is_mounted_without_the_space_lock(
    node: Node, short_locks: None, after: Arrange
) -> None:
    """An Epilog that runs beside it could take it for one that nobody needs."""
    path = node.staged(1)
    node.epilog(1)
    with contextlib.ExitStack() as undo:
        held = lock.held(node.cache.space_lock, 0)
        after(copy_wait, "wait_for_copy", lambda: undo.enter_context(held))
        assert node.prolog(2, path).ended == (1, "failed", "busy")
        assert node.binds() == {}


@pytest.mark.parametrize("how", ["keys", "room", "tidy"])
def test_no_entry_is_evicted_without_the_space_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A lease may be written just now, for the very entry that the plan takes."""
    path = node.put("alice/image.sqsh")
    key = node.prolog(1, path).outcome.key
    node.epilog(1)
    monkeypatch.setattr(lock, "SPACE_TIMEOUT", 0.05)
    tight = Config(max_size=SizeOrShare(size=300_000), low_watermark=SizeOrShare(share=0.01))
    ways: dict[str, Callable[[], tuple[str, ...]]] = {
        "keys": lambda: evict.evict_keys(node.cache, node.leases, [key]),
        "room": lambda: evict.make_room(node.cache, node.leases, tight, "/x", 200_000),
        "tidy": lambda: evict.evict_to_watermark(node.cache, node.leases, tight, 0.05),
    }
    work = ways[how]
    with lock.held(node.cache.space_lock, 0), pytest.raises(lock.LockTimeout):
        work()
    assert node.entries() == {key}
    assert work() == (key,)


def test_epilog_unmounts_no_redirect_without_the_space_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Prolog of another job may be about to count on it; but its own lease goes.

    Nobody would come back for that: its entry could never be evicted again.
    """
    path, other = node.staged(1), node.staged(2, "alice/other.sqsh")
    with monkeypatch.context() as patch, lock.held(node.cache.space_lock, 0):
        patch.setattr(lock, "SPACE_TIMEOUT", 0.05)
        assert node.epilog(1).ended == (1, "failed", "busy")
    assert set(node.binds()) == {str(path), str(other)}
    assert node.lease(1) is None
    node.epilog(2)
    assert node.binds() == {}, "the next Epilog takes off what nobody needs"
