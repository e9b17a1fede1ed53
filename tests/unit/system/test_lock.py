"""The node's locks: flock(2), released with their process, on a file that stays the same."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.system import lock, mounts
from releases import RELEASES, import_release

Hold = Callable[[Path, float], contextlib.AbstractContextManager[None]]


@pytest.fixture(params=RELEASES)
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """What holds a lock by each release of filelock that the program may meet."""
    with import_release(request.param, monkeypatch):
        yield lock.held_for_work


def test_held_lock_is_busy_for_another_and_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0), pytest.raises(lock.LockTimeout, match=r"a\.lock"), lock.held(path, 0):
        pass
    with lock.held(path, 0):
        pass


def test_lock_is_a_flock_that_other_programs_see(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0), path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_file_stays_the_same_and_is_roots_own(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0):
        inode = path.stat().st_ino
    with lock.held(path, 0):
        pass
    assert path.stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == 0o600


def test_lock_that_is_released_in_time_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with lock.held(path, 60):
            assert not lock.is_free(path)
    assert lock.is_free(path)


def test_file_system_without_locks_is_an_error_and_not_a_soft_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is only a file outlives a crash, and nobody would stage on this node again."""

    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises((OSError, NotImplementedError)), lock.held(tmp_path / "a.lock", 0):
        pass


def test_lock_that_is_held_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0):
        lock.remove_if_free(path)
        assert path.exists()
        assert not lock.is_free(path)
    lock.remove_if_free(path)
    assert not path.exists()
    lock.remove_if_free(path)
    assert not path.exists()


Happens = Callable[[], object]


@pytest.fixture
def before_flock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Happens], None]:
    """Has something happen between the next open of a lock file and its flock."""
    real = fcntl.flock

    def arrange(happens: Happens) -> None:
        def flock(*arguments: int) -> None:
            monkeypatch.setattr(fcntl, "flock", real)
            happens()
            real(*arguments)

        monkeypatch.setattr(fcntl, "flock", flock)

    return arrange


@pytest.mark.parametrize("is_there", [True, False])
def test_lock_that_is_removed_after_it_was_opened_is_not_split(
    tmp_path: Path, before_flock: Callable[[Happens], None], is_there: bool
) -> None:
    path = tmp_path / "a.lock"
    if is_there:
        path.touch()
    before_flock(lambda: lock.remove_if_free(path))
    with lock.held(path, 60):
        with pytest.raises(lock.LockTimeout), lock.held(path, 0):
            pass
        assert not lock.is_free(path)


def test_lock_that_is_removed_while_somebody_waits_for_it_is_not_split(
    tmp_path: Path, before_flock: Callable[[Happens], None]
) -> None:
    """The one who waits has found it taken by then."""
    path = tmp_path / "a.lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def removed() -> None:
            fcntl.flock(other, fcntl.LOCK_UN)
            lock.remove_if_free(path)

        real = lock.acquire_now
        with pytest.MonkeyPatch.context() as patch:

            def then(path: Path) -> int | None:
                patch.undo()
                taken = real(path)
                before_flock(removed)
                return taken

            patch.setattr(lock, "acquire_now", then)
            with lock.held(path, 60), pytest.raises(lock.LockTimeout), lock.held(path, 0):
                pass


def test_lock_of_which_a_new_one_is_held_is_not_free(
    tmp_path: Path, before_flock: Callable[[Happens], None]
) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with contextlib.ExitStack() as later:

        def replaced() -> None:
            lock.remove_if_free(path)
            later.enter_context(lock.held(path, 0))

        before_flock(replaced)
        assert not lock.is_free(path)


def test_lock_makes_no_folder(tmp_path: Path) -> None:
    """Where the cache's disk is gone it would make a cache on the root disk."""
    with pytest.raises(FileNotFoundError), lock.held(tmp_path / "cache/locks/a.lock", 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_is_free_sees_a_lock_and_does_not_take_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert lock.is_free(path)
    assert not path.exists()
    with lock.held(path, 0):
        assert not lock.is_free(path)
    assert lock.is_free(path)
    with lock.held(path, 0):
        pass


def test_lookers_do_not_see_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # what a look does, for as long as we like
        assert lock.is_free(path)


def test_lock_on_a_disk_that_is_read_only_can_be_looked_at(
    tmp_path: Path, private_mounts: None
) -> None:
    """The peer service sees the cache so; the stager, which holds the lock, does not."""
    real, seen = tmp_path / "real", tmp_path / "seen"
    real.mkdir()
    seen.mkdir()
    mounts.mount(str(real), str(seen), mounts.MS_BIND)
    mounts.mount("none", str(seen), mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_RDONLY)
    with lock.held(real / "a.lock", 0):
        assert not lock.is_free(seen / "a.lock")
    assert lock.is_free(seen / "a.lock")
    assert lock.is_free(seen / "none.lock")


def test_lock_of_work_and_lock_of_a_hook_are_one(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    for mine, theirs in ((work, lock.held), (lock.held, work), (work, work)):
        with mine(path, 0):
            assert not lock.is_free(path)
            with pytest.raises(lock.LockTimeout, match=r"a\.lock"), theirs(path, 0):
                pass
        assert lock.is_free(path)


def test_lock_of_work_is_free_after_an_error(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    with pytest.raises(TimeoutError), work(path, 0):
        raise TimeoutError
    assert lock.is_free(path)


def test_lock_of_work_is_taken_once_who_looks_at_it_has_gone(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with work(path, 60):
            assert not lock.is_free(path)


def test_file_of_a_lock_of_work_stays_and_is_roots_own(tmp_path: Path, work: Hold) -> None:
    """Who can open it can hold the lock."""
    path = tmp_path / "a.lock"
    with work(path, 0):
        assert path.stat().st_mode & 0o777 == 0o600
        inode = path.stat().st_ino
    with work(path, 0):
        pass
    assert path.stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == 0o600


def test_who_waits_for_a_lock_of_work_leaves_its_file_as_it_is(tmp_path: Path, work: Hold) -> None:
    """Its time says which stager took it (cache/layout.stager): O_TRUNC would set that."""
    path = tmp_path / "a.lock"
    with lock.held(path, 0):
        path.write_text("1")
        os.utime(path, (7, 7))
        with pytest.raises(lock.LockTimeout), work(path, 0):
            pass
        assert (path.read_text(), path.stat().st_mtime) == ("1", 7)


def test_lock_of_work_follows_no_link(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"a\.lock"), work(path, 0):
        pass
    assert not (tmp_path / "target").exists()


def test_lock_of_work_makes_no_folder(tmp_path: Path, work: Hold) -> None:
    with pytest.raises(FileNotFoundError), work(tmp_path / "cache/locks/a.lock", 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_of_work_without_flock_is_an_error_and_not_a_soft_lock(
    tmp_path: Path, work: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for _ in range(2):
        with pytest.raises(OSError, match="Function not implemented"), work(tmp_path / "a", 0):
            pass


def test_lock_of_work_that_is_removed_after_it_was_opened_is_not_split(
    tmp_path: Path, work: Hold, before_flock: Callable[[Happens], None]
) -> None:
    path = tmp_path / "a.lock"
    before_flock(lambda: lock.remove_if_free(path))
    with work(path, 60):
        for one in (lock.held, work):
            with pytest.raises(lock.LockTimeout), one(path, 0):
                pass
        assert not lock.is_free(path)
