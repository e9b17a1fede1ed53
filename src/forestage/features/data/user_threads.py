"""Work on many files of a user at once: in as many threads as the latency of their source pays.

A call that waits for a file server runs without Python's lock, so many threads wait at once. A call
that waits for nothing gives that lock away for a microsecond, and the next thread, on another
processor, takes it: each file then costs dozens of switches between two threads and four times the
processor time of one (42 switches a file, measured on tmpfs with two processors). So the first
thread works alone, and gets others only once it has waited.
"""

import contextlib
import ctypes
import errno
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from forestage.errors import Declined, Failed
from forestage.system.as_user import User

MOST = 32  # threads; so many files are with a file server at once
AT_ONCE = 8  # files of one turn of a thread

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")
Item = TypeVar("Item")


def set_thread_user(user: User) -> None:
    """Has this thread use the user's ids for files, for good; the groups are the process' own."""
    # glibc changes all ids but these for each thread of a process.
    _libc.setfsgid(user.gid)
    _libc.setfsuid(user.uid)
    if _libc.setfsuid(-1) & 0xFFFFFFFF != user.uid or _libc.setfsgid(-1) & 0xFFFFFFFF != user.gid:
        raise PermissionError(errno.EPERM, "cannot take on the user's ids")


@contextlib.contextmanager
def with_thread_user(user: User) -> Iterator[None]:
    """Has this thread use the user's ids for files for a while."""
    try:
        set_thread_user(user)
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def count_threads(threads: int, wall: float, cpu: float) -> int:
    """Return how many threads pay where so many took so many seconds of the process. Pure.

    As many as keep it busy all the time: more would wait for Python's lock. With half as many, a
    source that answers in 0.1 ms took three times as long (measured).
    """
    return max(threads, min(MOST, int(threads * wall / max(cpu, 1e-6))))


class UserThreadPool:
    """Threads with a user's ids for files. `threads` is how many paid so far."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.threads = 1

    def map_items(self, items: Sequence[Item], work: Callable[[Item], T]) -> list[T]:
        """Does `work` on each of the items; in their order. Raises their first error."""
        results: dict[int, T] = {}

        def do(some: range) -> list[range]:
            for number in some:
                results[number] = work(items[number])
            return []

        # Few files are a sample, whose looks are to take a few round trips.
        step = AT_ONCE if len(items) > AT_ONCE * MOST else 1
        self.process_with_more(
            (range(at, at + step)[: len(items) - at] for at in range(0, len(items), step)), do
        )
        return [results[number] for number in range(len(items))]

    def process_with_more(self, first: Iterable[T], work: Callable[[T], list[T]]) -> None:
        """Does `work` on items, and on those that it returns. Raises their first error."""
        _PoolRun(self, first, work).run()


class _PoolRun(Generic[T]):
    """One run of a team: what its threads share, under `condition`."""

    def __init__(
        self, team: UserThreadPool, first: Iterable[T], work: Callable[[T], list[T]]
    ) -> None:
        self.team = team
        self.work = work
        self.todo = deque(first)
        self.condition = threading.Condition()
        self.busy, self.over = 0, False
        self.errors: list[Exception] = []
        self.started: list[threading.Thread] = []
        self.since = _CpuStopwatch()

    def run(self) -> None:
        with self.condition:
            self._start(min(self.team.threads, len(self.todo)))
        for thread in self.started:  # it grows meanwhile, by threads that are not over
            thread.join()
        if self.errors:
            raise self.errors[0]
        if self.todo or self.busy:
            raise Failed("helper", "a thread that works on files died")

    def _start(self, wanted: int) -> None:
        while len(self.started) < wanted:
            thread = threading.Thread(target=self._run_thread, name=f"user-{wanted}")
            try:
                thread.start()
            except RuntimeError:  # of a cgroup that may have no more: those that run go on
                if not self.started:
                    raise Failed("helper", "no thread could be started") from None
                return
            self.started.append(thread)

    def _run_thread(self) -> None:
        try:
            set_thread_user(self.team.user)
            while (item := self._pop_item()) is not None:
                waits = _count_waits()
                more = self.work(item)
                self._finish_item(more, _count_waits() - waits)
        except (OSError, Declined) as error:
            self.errors.append(error)
        finally:
            with self.condition:
                self.over = True  # all is done, or something has failed
                self.condition.notify_all()

    def _pop_item(self) -> T | None:
        """Takes an item off the list, once there is one; None where all is done."""
        with self.condition:
            while not self.todo and self.busy and not self.over:
                self.condition.wait()
            if self.over or not self.todo:
                return None
            self.busy += 1
            return self.todo.popleft()

    def _finish_item(self, more: list[T], waits: int) -> None:
        """Notes that an item is done, what it has brought, and how often its thread waited."""
        with self.condition:
            self.busy -= 1
            self.todo.extend(more)
            # A thread that lost its processor to another process has not waited: no other helps.
            if waits:
                took = self.since.elapsed()
                self.team.threads = count_threads(self.team.threads, *took)
                self.since = _CpuStopwatch()
            self._start(min(self.team.threads, self.busy + len(self.todo)))
            # Not all of them: those that find nothing would only wake, and sleep again.
            self.condition.notify(len(more))


class _CpuStopwatch:
    def __init__(self) -> None:
        self.wall, self.cpu = time.monotonic(), time.process_time()

    def elapsed(self) -> tuple[float, float]:
        """Seconds since then, and those that this process has worked."""
        return time.monotonic() - self.wall, time.process_time() - self.cpu


def _count_waits() -> int:
    """How often this thread gave up its processor of its own accord (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def map_as_user(user: User, items: Iterable[Item], work: Callable[[Item], T]) -> list[T]:
    """Does `work` on each of the items, in threads that have the user's ids; in their order."""
    return UserThreadPool(user).map_items(list(items), work)
