"""The node's locks: flock(2), released with their process, on a file that stays the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from forestage.system import lock
from releases import RELEASES, import_release

Hold = Callable[[Path, float], contextlib.AbstractContextManager[None]]


@pytest.fixture(params=["held", *RELEASES])
def hold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """What hooks hold a lock by; and work, by each release of filelock."""
    if request.param == "held":
        yield lock.held
    else:
        with import_release(request.param, monkeypatch):
            yield lock.held_for_work


def test_lock_is_freed_when_its_process_is_killed(tmp_path: Path, hold: Hold) -> None:
    path = tmp_path / "a.lock"
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold(path, 0):
                os.write(tell, b"x")
                signal.pause()
        finally:
            os._exit(1)  # never on into pytest
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(lock.LockTimeout), lock.held(path, 0):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock.held(path, 0):
        pass
    os.close(ready)


def test_child_forked_while_a_lock_is_held_does_not_keep_the_lock(
    tmp_path: Path, hold: Hold
) -> None:
    path = tmp_path / "a.lock"
    with hold(path, 0):
        child = os.fork()
        if child == 0:
            try:
                signal.pause()
            finally:
                os._exit(1)  # never on into pytest
    assert lock.is_free(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_lock_stays_held_when_a_forked_child_exits(tmp_path: Path, hold: Hold) -> None:
    """A stager forks: its children let go of all that they have of it."""
    path = tmp_path / "a.lock"
    with hold(path, 0):
        assert os.waitpid(forked(lambda: None), 0)[1] == 0
        assert not lock.is_free(path)
        with pytest.raises(lock.LockTimeout), lock.held(path, 0):
            pass


def test_lock_is_never_held_twice_though_its_file_is_repeatedly_removed(
    tmp_path: Path, hold: Hold
) -> None:
    """Several count in one file, which comes out right only if one does so at a time."""
    path, count = tmp_path / "a.lock", tmp_path / "count"
    count.write_text("0")

    def work() -> None:
        for _, one in zip(range(100), cycle((hold, lock.held)), strict=False):
            with one(path, 60):
                count.write_text(str(int(count.read_text()) + 1))
            lock.remove_if_free(path)

    children = [forked(work) for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert count.read_text() == "400"


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)  # never on into pytest
    return child
