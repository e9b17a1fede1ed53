"""Work on many files of a user at once: with whose ids, in how many threads, and how it ends."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.errors import Declined, Failed
from forestage.features.data import user_threads
from forestage.system.as_user import User

ALICE = User("", 5001, 5001)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return tmp_path


def test_thread_has_root_ids_again_after_acting_as_a_user(as_root: None, top: Path) -> None:
    (top / "file").write_bytes(b"x")
    (top / "file").chmod(0o600)
    with user_threads.with_thread_user(ALICE), pytest.raises(PermissionError):
        (top / "file").read_bytes()
    assert (top / "file").read_bytes() == b"x"
    (top / "new").touch()
    assert ((top / "new").stat().st_uid, (top / "new").stat().st_gid) == (0, 0)


def test_other_threads_keep_root_ids_while_a_thread_acts_as_a_user(
    as_root: None, top: Path
) -> None:
    (top / "file").write_bytes(b"x")
    (top / "file").chmod(0o600)
    acts, over = threading.Event(), threading.Event()

    def act() -> None:
        user_threads.set_thread_user(ALICE)
        acts.set()
        over.wait(240)

    thread = threading.Thread(target=act)
    thread.start()
    assert acts.wait(240)
    assert (top / "file").read_bytes() == b"x"
    over.set()
    thread.join()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "gone"), Declined("x", "y")])
def test_error_of_one_user_thread_is_raised_to_the_caller(me: User, error: Exception) -> None:
    def work(number: int) -> int:
        if number == 3:
            raise error
        return number

    with pytest.raises(type(error)) as caught:
        user_threads.map_as_user(me, range(10_000), work)
    assert caught.value is error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_user_thread_that_dies_raises_failed_instead_of_blocking(me: User) -> None:
    def work(number: int) -> int:
        return 1 // (number - 3)

    with pytest.raises(Failed, match="thread"):
        user_threads.map_as_user(me, range(10_000), work)


def test_user_threads_return_results_in_the_order_of_the_items(me: User) -> None:
    work: Callable[[int], int] = lambda number: -number  # noqa: E731
    assert user_threads.map_as_user(me, range(500), work) == [-number for number in range(500)]
    assert user_threads.map_as_user(me, [], work) == []


# --- how many


def test_cpu_bound_work_as_a_user_runs_in_one_thread(me: User) -> None:
    """However much there is: each further one would wait for Python's lock, and hold it up."""
    done = user_threads.map_as_user(me, range(10_000), lambda _: threading.get_ident())
    assert len(set(done)) == 1


def test_blocking_work_as_a_user_gets_more_threads(me: User) -> None:
    together, alone, met = threading.Barrier(8, timeout=240), iter(range(40)), threading.local()

    def work(_: int) -> int:
        if next(alone, None) is not None:
            time.sleep(0.01)
        elif not hasattr(met, "others"):
            met.others = True
            together.wait()
        return threading.get_ident()

    assert len(set(user_threads.map_as_user(me, range(1_000), work))) >= 8


def test_work_as_a_user_completes_with_one_thread_if_no_more_can_be_started(
    me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, real = [], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert user_threads.map_as_user(me, range(30), lambda number: time.sleep(0.001) or number) == [
        *range(30)
    ]
    assert len(started) > 1
    with pytest.raises(Failed, match="no thread"):
        user_threads.map_as_user(me, range(3), lambda number: number)


@pytest.mark.parametrize(
    ("threads", "wall", "cpu", "pay"),
    [
        (1, 0.001, 0.001, 1),
        (1, 0.010, 0.001, 10),
        (10, 0.010, 0.005, 20),
        (20, 0.010, 0.011, 20),
        (1, 0.100, 0.001, user_threads.MOST),
        (4, 0.100, 0.0, user_threads.MOST),
        (4, 0.0, 0.0, 4),
    ],
)
def test_thread_count_grows_with_the_ratio_of_wall_time_to_cpu_time(
    threads: int, wall: float, cpu: float, pay: int
) -> None:
    assert user_threads.count_threads(threads, wall, cpu) == pay
