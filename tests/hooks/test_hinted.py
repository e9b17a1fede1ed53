"""Images of a comment with `redirect: spank`: each step shows them, whatever it starts by hand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forestage.admin.tally import Tally
from forestage.clock import Clock
from forestage.events import Handled, read
from forestage.hooks.boundary import IMAGE_OPTION, Hook
from node import BOB, Node, content, until


@pytest.fixture
def spank(node: Node) -> Node:
    node.configure(redirect="spank")
    return node


@pytest.fixture
def paths(spank: Node) -> list[Path]:
    """Two images that the cache has."""
    made = [spank.put(f"alice/{n}.sqsh", content(n)) for n in (1, 2)]
    for job, path in enumerate(made, 100):
        assert spank.prolog(job, path).said == ("started", "")
        key = spank.identity(path).key
        until(lambda key=key: key in spank.entries() and spank.is_idle(key), "the copy")  # type: ignore[misc]
        spank.epilog(job)
    return made


def step(node: Node, job: int, capfd: pytest.CaptureFixture[str], image: Path | None = None) -> str:
    """What the helper answers the companion."""
    environ = node.environ(job, image) | {"SLURM_STEP_ID": "4294967291"}
    capfd.readouterr()
    assert Hook("step", environ, time.monotonic()).run(node.places, Clock()) == 0
    return capfd.readouterr().out


def used(node: Node, path: Path) -> str:
    found = node.identity(path)
    numbers = (found.inode, found.size, found.mtime_ns, found.ctime_ns, 1)
    return "\t".join(["use", str(node.cache.image(found.key)), str(path), *map(str, numbers)])


def test_step_without_an_image_shows_all_that_the_comment_names(
    spank: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    link = spank.server / "alice/link"
    link.symlink_to("2.sqsh")
    assert spank.prolog(1, comment=f"stage={paths[0]},{spank.shared}/alice/link").code == 0
    said = step(spank, 1, capfd)
    assert said.splitlines() == [
        *(f"also\t{used(spank, path)}" for path in paths),
        "leave\tno-image",
    ]
    assert [one.result for one in spank.outcomes("step", 1)] == ["hit", "hit"]
    spank.epilog(1)
    assert list(spank.leases.directory.iterdir()) == []


def test_step_with_an_image_shows_that_and_the_comments(
    spank: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert spank.prolog(1, comment=f"stage={paths[0]}").code == 0
    said = step(spank, 1, capfd, paths[1])
    assert said.splitlines() == [f"also\t{used(spank, paths[0])}", used(spank, paths[1])]


def test_image_that_was_declined_is_shown_to_no_step(
    spank: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    path = spank.put("bob/closed.sqsh", user=BOB, mode=0o600)
    assert spank.prolog(1, comment=f"stage={path}").said == ("declined", "no-permission")
    assert not spank.leases.hints(1).exists()
    assert step(spank, 1, capfd) == "leave\tno-image\n"


def test_image_of_the_option_alone_needs_no_helper_in_other_steps(
    spank: Node, paths: list[Path]
) -> None:
    assert spank.prolog(1, paths[0]).said == ("hit", "")
    assert not spank.leases.hints(1).exists()


def counted(node: Node) -> Tally:
    found = Tally()
    for event in read(node.places.events):
        if event.job == 1:
            found.add(event)
    return found


def test_bytes_are_spared_once_a_step_is_shown_the_copy(
    spank: Node, paths: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert spank.prolog(1, comment=f"stage={paths[0]}").said == ("hit", "")
    assert counted(spank).spared == {}
    step(spank, 1, capfd)
    step(spank, 1, capfd)
    size = paths[0].stat().st_size
    assert counted(spank).spared == {"hit": 2 * size}
    assert counted(spank).starts == {"hit": 2}


def test_hint_of_a_node_that_binds_is_no_matter_of_the_steps(node: Node) -> None:
    path = node.put("alice/1.sqsh")
    assert node.prolog(1, comment=f"stage={path}").said == ("copied", "")
    assert not node.leases.hints(1).exists()
    assert isinstance(node.outcomes("prolog", 1)[0], Handled)
    assert IMAGE_OPTION not in node.environ(1)
