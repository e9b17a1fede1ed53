"""Every redirect comes off at once, and none is laid behind it: after that the package may go."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from forestage import trace, unredirect
from forestage.cli.world import World
from forestage.clock import Clock
from forestage.system import lock
from forestage.unredirect import Undone
from node import BOB, Node, content


def undo(node: Node) -> Undone:
    return unredirect.unredirect(World(node.places, Clock()))


def switch_off(node: Node) -> None:
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.disabled.write_text("forestage was removed\n")


@pytest.fixture
def configured(node: Node) -> Node:
    node.configure(cache="/mnt/nvme/forestage")
    return node


def test_paths_show_their_sources_and_running_jobs_keep_what_they_have_open(
    configured: Node,
) -> None:
    node = configured
    path, other = node.put("alice/a.sqsh"), node.put("bob/b.sqsh", content(2), BOB)
    node.prolog(7, path)
    node.prolog(8, other, user=BOB)
    with path.open("rb") as held:
        assert set(undo(node).paths) == {str(path), str(other)}
        assert node.binds() == {}
        assert node.shows_source(path)
        node.put("alice/a.sqsh", content(3))
        assert held.read() == content()
        assert path.read_bytes() == content(3)
    assert node.lease(7) is not None, "nothing that the job has open may be evicted"
    assert undo(node).paths == ()


def test_a_hook_that_waited_for_its_copy_lays_nothing_behind_it(
    configured: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the program gone, nobody would take that redirect off any more."""
    node = configured
    path = node.put("alice/a.sqsh")

    def removed_meanwhile(point: str) -> None:
        if point == "published":  # the hook has looked at the switch long ago
            switch_off(node)
            unredirect.unredirect(World(node.places, Clock()))

    monkeypatch.setattr(trace, "listener", removed_meanwhile)
    assert node.prolog(7, path).said == ("declined", "disabled")
    assert node.binds() == {}
    assert node.shows_source(path)


def test_a_broken_configuration_keeps_no_redirect(configured: Node) -> None:
    node = configured
    path = node.put("alice/a.sqsh")
    node.prolog(7, path)
    node.write_config("sources: [")
    assert undo(node).paths == (str(path),)
    assert node.shows_source(path)


def test_a_lock_that_stays_held_does_not_keep_them(
    configured: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = configured
    path = node.put("alice/a.sqsh")
    node.prolog(7, path)

    def busy(path: Path, timeout: float) -> contextlib.AbstractContextManager[None]:
        raise lock.Busy(f"{path.name} is held by another process")

    monkeypatch.setattr(lock, "held_if_writable", busy)
    done = undo(node)
    assert (done.paths, len(done.problems)) == ((str(path),), 1)
    assert node.shows_source(path)


def test_a_node_without_a_cache_has_none(configured: Node) -> None:
    assert undo(configured) == Undone((), ())
