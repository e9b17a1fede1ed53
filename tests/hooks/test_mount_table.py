"""How often hooks read the mount table: each time costs the kernel something for every mount."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forestage.clock import Clock
from forestage.hooks.boundary import HookRun
from forestage.system import mounts
from helper import environ
from node import BOB, Node, content

Count = Callable[[Callable[[], object]], int]
FEW, MANY = 10, 1000

_fork = multiprocessing.get_context("fork")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Runs something; returns how often it read the mount table, its child processes too."""
    reads = _fork.Value("i", 0)
    current = mounts.list_mounts

    def counting() -> list[mounts.MountInfo]:
        with reads.get_lock():
            reads.value += 1
        return current()

    monkeypatch.setattr(mounts, "list_mounts", counting)

    def counted(work: Callable[[], object]) -> int:
        before = reads.value
        work()
        return reads.value - before

    return counted


@pytest.fixture(params=[FEW, MANY])
def crowded(request: pytest.FixtureRequest, node: Node, tmp_path: Path) -> Iterator[Node]:
    """A node with few mounts of others, and one with many."""
    others = tmp_path / "others"
    others.mkdir()
    mounts.mount("tmpfs", str(others), 0, "tmpfs")
    for number in range(request.param):
        (others / f"{number}").touch()
        mounts.mount("/dev/null", str(others / f"{number}"), mounts.MS_BIND)
    yield node
    mounts.umount(str(others))


def test_outdated_redirect_mounted_while_the_source_is_opened_is_not_read_and_is_unmounted(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that was read before the path is opened would not have it."""
    other = node.put("bob/other.sqsh", content(3), BOB)
    outdated = node.prolog(2, other, user=BOB).outcome.key
    path = node.staged(1)
    key = node.held(1).uses[0].key
    node.epilog(2)
    node.epilog(1)
    node.configure(redirect="spank")
    made, real = tmp_path / "made", os.open

    def after_its_bind(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        user = os.geteuid()  # in the look's own process, which acts as the user just now
        if user and name == str(path) and flags == os.O_PATH:
            os.seteuid(0)
            if not made.exists():
                made.mkdir()
                mounts.mount(str(node.cache.image_path(outdated)), str(path), mounts.MS_BIND)
            os.seteuid(user)
        return real(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", after_its_bind)
    ran = node.prolog(7, path)
    assert made.exists()
    assert (*ran.said, ran.outcome.key) == ("hit", "", key)
    assert node.shows_source(path)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("redirect", "others", "reads"),
    [
        # What the source lies on. The Epilog: what is to go, under the lock.
        ("spank", False, (1, 1, 1)),
        # And what lies at the path, under the lock. The step finds the redirect: twice the source
        # is opened again, and once it is looked at whether the redirect is outdated. The Epilog
        # looks again at what it has claimed, and at what covers it.
        ("bind", False, (2, 5, 3)),
        # The Prolog also looks whether one is outdated.
        ("bind", True, (3, 5, 3)),
    ],
)
def test_hooks_of_a_hit_read_the_mount_table_a_fixed_number_of_times(
    crowded: Node, count: Count, redirect: str, others: bool, reads: tuple[int, ...]
) -> None:
    node = crowded
    path = node.staged(1)
    node.epilog(1)
    if others:
        node.prolog(2, node.put("bob/other.sqsh", content(3), BOB), user=BOB)
    node.configure(redirect=redirect)
    step = HookRun("step", environ(node, 7, path), 0.0)
    counted = (
        count(lambda: node.prolog(7, path)),
        count(lambda: step.run(node.places, Clock())),
        count(lambda: node.epilog(7)),
    )
    assert [one.result for one in node.outcomes("prolog", 7)] == ["hit"]
    assert counted == reads
