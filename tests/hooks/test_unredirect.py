"""`forestage unredirect`: every redirect is unmounted, and no hook mounts another behind it."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from forestage import trace
from forestage.clock import Clock
from forestage.commands.main import CommandContext, main
from forestage.commands.unredirect import UnredirectResult
from forestage.system import lock
from node import BOB, Node, content


def undo(node: Node) -> UnredirectResult:
    done = CliRunner().invoke(
        main, ["unredirect", "--json"], obj=CommandContext(node.places, Clock())
    )
    return msgspec.json.decode(done.stdout, type=UnredirectResult)


@pytest.fixture(autouse=True)
def configured(node: Node) -> None:
    node.configure(cache="/mnt/nvme/forestage")


def test_unredirect_unmounts_all_redirects_and_keeps_open_files_readable(
    node: Node,
) -> None:
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


def test_prolog_mounts_no_redirect_if_unredirect_ran_during_its_copy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the program gone, nobody would unmount that redirect any more."""
    path = node.put("alice/a.sqsh")

    def removed_meanwhile(point: str) -> None:
        if point == "published":  # long after the hook has read the switch
            node.switch_off()
            undo(node)

    monkeypatch.setattr(trace, "listener", removed_meanwhile)
    assert node.prolog(7, path).said == ("declined", "disabled")
    assert node.binds() == {}
    assert node.shows_source(path)


def test_unredirect_unmounts_with_a_broken_configuration(node: Node) -> None:
    path = node.staged(7)
    node.write_config("sources: [")
    assert undo(node).paths == (str(path),)
    assert node.shows_source(path)


def test_unredirect_unmounts_while_the_space_lock_is_held(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.staged(7)

    monkeypatch.setattr(lock, "SPACE_TIMEOUT", 0.05)
    with lock.held(node.cache.space_lock, 0):
        done = undo(node)
    assert (done.paths, len(done.problems)) == ((str(path),), 1)
    assert node.shows_source(path)


def test_unredirect_without_a_cache_unmounts_nothing(node: Node) -> None:
    assert undo(node) == UnredirectResult((), ())
