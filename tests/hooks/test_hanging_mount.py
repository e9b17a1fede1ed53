"""`redirect: bind` over a file that somebody holds: mount(2) waits, and no signal ends that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.bind import redirect
from node import BOB, Arrange, Node, children_left, content, until
from parking import Park


@pytest.fixture(autouse=True)
def _let_go(node: Node, park: Park) -> Iterator[None]:
    """Before the node goes."""
    yield
    park.let_go()
    until(lambda: not children_left(), "the late mount")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redirect, "OVER_TIMEOUT", 0.5)


@pytest.fixture
def holding(park: Park, before: Arrange) -> Callable[[Path], None]:
    """Has somebody hold a file in the last moment, when the hook has asked who writes to it."""

    def arrange(path: Path) -> None:
        once = [path]
        before(redirect, "_bind_over_target", lambda: once and park(once.pop(), "write"))

    return arrange


def test_redirect_is_declined_and_the_hook_ends_if_the_mount_hangs(
    node: Node, park: Park, holding: Callable[[Path], None]
) -> None:
    path = node.put("alice/image.sqsh")
    holding(path)
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, "declined", "mount-hangs")
    assert node.binds() == {}
    park.let_go()
    until(lambda: not children_left(), "the late mount")
    assert node.binds() == {}
    assert node.shows_source(path)


def test_second_redirect_of_a_user_with_a_hanging_mount_is_declined_at_once(
    node: Node, holding: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = node.put("alice/a.sqsh"), node.put("alice/b.sqsh", content(2))
    holding(path)
    assert node.prolog(1, path).said == ("declined", "mount-hangs")
    monkeypatch.setattr(redirect, "OVER_TIMEOUT", 600.0)
    assert node.prolog(2, other).said == ("declined", "mount-hangs")
    assert node.prolog(3, other, BOB).outcome.redirect == "mounted"
