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


def test_held_lock_times_out_a_second_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0), pytest.raises(lock.LockTimeout, match=r"a\.lock"), lock.held(path, 0):
        pass
    with lock.held(path, 0):
        pass


def test_lock_conflicts_with_flock_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0), path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_file_keeps_its_inode_and_has_mode_600(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock.held(path, 0):
        inode = path.stat().st_ino
    with lock.held(path, 0):
        pass
    assert path.stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == 0o600


def test_lock_released_within_the_timeout_is_acquired(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with lock.held(path, 60):
            assert not lock.is_free(path)
    assert lock.is_free(path)


def test_lock_on_a_file_system_without_flock_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is only a file outlives a crash, and nobody would stage on this node again."""

    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises((OSError, NotImplementedError)), lock.held(tmp_path / "a.lock", 0):
        pass


def test_held_lock_file_is_not_removed(tmp_path: Path) -> None:
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
def test_lock_file_removed_after_opening_gives_no_two_holders(
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


def test_lock_file_removed_while_a_process_waits_gives_no_two_holders(
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


def test_lock_with_a_replaced_and_locked_file_is_not_free(
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


def test_lock_in_a_missing_directory_raises_and_creates_nothing(tmp_path: Path) -> None:
    """Where the cache's disk is gone it would make a cache on the root disk."""
    with pytest.raises(FileNotFoundError), lock.held(tmp_path / "cache/locks/a.lock", 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_is_free_reports_a_held_lock_without_acquiring(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert lock.is_free(path)
    assert not path.exists()
    with lock.held(path, 0):
        assert not lock.is_free(path)
    assert lock.is_free(path)
    with lock.held(path, 0):
        pass


def test_is_free_ignores_a_shared_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # what a look does, for as long as we like
        assert lock.is_free(path)


def test_is_free_works_on_a_read_only_mount(tmp_path: Path, private_mounts: None) -> None:
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


def test_work_lock_and_hook_lock_exclude_each_other(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    for mine, theirs in ((work, lock.held), (lock.held, work), (work, work)):
        with mine(path, 0):
            assert not lock.is_free(path)
            with pytest.raises(lock.LockTimeout, match=r"a\.lock"), theirs(path, 0):
                pass
        assert lock.is_free(path)


def test_work_lock_is_free_after_an_error(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    with pytest.raises(TimeoutError), work(path, 0):
        raise TimeoutError
    assert lock.is_free(path)


def test_work_lock_is_acquired_after_a_shared_lock_is_released(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with work(path, 60):
            assert not lock.is_free(path)


def test_work_lock_file_keeps_its_inode_and_has_mode_600(tmp_path: Path, work: Hold) -> None:
    """Who can open it can hold the lock."""
    path = tmp_path / "a.lock"
    with work(path, 0):
        assert path.stat().st_mode & 0o777 == 0o600
        inode = path.stat().st_ino
    with work(path, 0):
        pass
    assert path.stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == 0o600


def test_waiting_for_a_work_lock_changes_neither_text_nor_mtime_of_its_file(
    tmp_path: Path, work: Hold
) -> None:
    """Its time says which stager took it (cache/layout.find_stager): O_TRUNC would set that."""
    path = tmp_path / "a.lock"
    with lock.held(path, 0):
        path.write_text("1")
        os.utime(path, (7, 7))
        with pytest.raises(lock.LockTimeout), work(path, 0):
            pass
        assert (path.read_text(), path.stat().st_mtime) == ("1", 7)


def test_work_lock_follows_no_symlink(tmp_path: Path, work: Hold) -> None:
    path = tmp_path / "a.lock"
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"a\.lock"), work(path, 0):
        pass
    assert not (tmp_path / "target").exists()


def test_work_lock_in_a_missing_directory_raises_and_creates_nothing(
    tmp_path: Path, work: Hold
) -> None:
    with pytest.raises(FileNotFoundError), work(tmp_path / "cache/locks/a.lock", 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_work_lock_on_a_file_system_without_flock_raises(
    tmp_path: Path, work: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for _ in range(2):
        with pytest.raises(OSError, match="Function not implemented"), work(tmp_path / "a", 0):
            pass


def test_work_lock_file_removed_after_opening_gives_no_two_holders(
    tmp_path: Path, work: Hold, before_flock: Callable[[Happens], None]
) -> None:
    path = tmp_path / "a.lock"
    before_flock(lambda: lock.remove_if_free(path))
    with work(path, 60):
        for one in (lock.held, work):
            with pytest.raises(lock.LockTimeout), one(path, 0):
                pass
        assert not lock.is_free(path)
