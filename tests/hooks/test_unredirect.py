"""`forestage unredirect`: every redirect is unmounted, and no hook mounts another behind it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from forestage import trace
from forestage.admin.unredirect import Unredirected
from forestage.cli.main import World, main
from forestage.clock import Clock
from forestage.system import lock
from node import BOB, Node, content


def undo(node: Node) -> Unredirected:
    done = CliRunner().invoke(main, ["unredirect", "--json"], obj=World(node.places, Clock()))
    return msgspec.json.decode(done.stdout, type=Unredirected)


def switch_off(node: Node) -> None:
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.disabled.write_text("forestage was removed\n")


@pytest.fixture
def configured(node: Node) -> Node:
    node.configure(cache="/mnt/nvme/forestage")
    return node


def test_unredirected_paths_show_sources_and_open_files_stay(
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


def test_hook_that_waited_for_its_copy_mounts_nothing_after_unredirect(
    configured: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the program gone, nobody would unmount that redirect any more."""
    node = configured
    path = node.put("alice/a.sqsh")

    def removed_meanwhile(point: str) -> None:
        if point == "published":  # long after the hook has read the switch
            switch_off(node)
            undo(node)

    monkeypatch.setattr(trace, "listener", removed_meanwhile)
    assert node.prolog(7, path).said == ("declined", "disabled")
    assert node.binds() == {}
    assert node.shows_source(path)


def test_broken_configuration_keeps_no_redirect(configured: Node) -> None:
    node = configured
    path = node.put("alice/a.sqsh")
    node.prolog(7, path)
    node.write_config("sources: [")
    assert undo(node).paths == (str(path),)
    assert node.shows_source(path)


def test_busy_lock_keeps_no_redirect(configured: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node = configured
    path = node.put("alice/a.sqsh")
    node.prolog(7, path)

    def busy(path: Path, timeout: float) -> contextlib.AbstractContextManager[None]:
        raise lock.Busy(f"{path.name} is held by another process")

    monkeypatch.setattr(lock, "held_if_writable", busy)
    done = undo(node)
    assert (done.paths, len(done.problems)) == ((str(path),), 1)
    assert node.shows_source(path)


def test_node_without_cache_has_no_redirect(configured: Node) -> None:
    assert undo(configured) == Unredirected((), ())
