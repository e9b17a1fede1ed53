"""A hook waits for the child that does its work, but not for one that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from forestage.hooks import hook_worker
from forestage.hooks.hook_worker import HookPipe, HookWorker, HookWorkerTimeout

Work = Callable[[HookPipe], None]
Begin = Callable[..., HookWorker]


def never(cache: str) -> float:
    pytest.fail(f"{cache} was asked")


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Those that were begun; they must not outlive the test."""
    begun: list[int] = []
    yield begun
    for pid in begun:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


@pytest.fixture
def begin(children: list[int], capfd: object) -> Begin:
    def begin(work: Work, keeps_stdout: bool = False) -> HookWorker:
        forked = hook_worker.fork_worker(keeps_stdout)
        assert forked is not None
        if isinstance(forked, HookPipe):
            try:
                work(forked)
            finally:
                os._exit(3)
        children.append(forked.pid)
        return forked

    return begin


def lives_until_the_test_is_over(there: int, here: int) -> None:
    """Forks a process that has all that its parent has, but the pipe's end by which it ends."""
    if os.fork() == 0:
        os.close(here)
        os.read(there, 1)
        os._exit(0)


def hangs(watched: HookPipe) -> None:
    watched.report_cache("/mnt/nvme/forestage")
    signal.pause()


def test_hook_exits_when_its_worker_reports_its_end(begin: Begin) -> None:
    assert begin(lambda child: child.exit_worker()).wait_for_exit(never) == 0


def test_hook_exits_with_its_worker_though_another_process_holds_the_pipe(begin: Begin) -> None:
    """A stager may live for hours; a child that says that it ends is not waited for."""
    there, here = os.pipe()

    def work(child: HookPipe) -> None:
        lives_until_the_test_is_over(there, here)
        child.exit_worker()

    assert begin(work).wait_for_exit(never) == 0
    os.close(here)
    os.close(there)


def test_hook_exits_when_its_worker_is_killed(begin: Begin) -> None:
    def work(child: HookPipe) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert begin(work).wait_for_exit(never) == -signal.SIGKILL


def test_hook_exits_when_its_worker_is_killed_though_another_process_holds_the_pipe(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_worker, "EXIT_POLL_INTERVAL", 0.01)
    there, here = os.pipe()

    def work(child: HookPipe) -> None:
        lives_until_the_test_is_over(there, here)
        os.kill(os.getpid(), signal.SIGKILL)

    assert begin(work).wait_for_exit(never) == -signal.SIGKILL
    os.close(here)
    os.close(there)


def test_hook_prints_the_workers_output_on_stderr(
    begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(child: HookPipe) -> None:
        os.write(2, b"a line\nhalf a ")
        child.report_cache("/cache")
        os.write(2, b"line\n")
        os.write(1, b"stdout\n")

    assert begin(work).wait_for_exit(never) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("a line\n")
    assert "stdout\n" in err


def test_worker_of_a_step_prints_its_answer_on_stdout(
    begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(child: HookPipe) -> None:
        os.write(1, b"leave\tno-image\n")
        child.exit_worker()

    assert begin(work, keeps_stdout=True).wait_for_exit(never) == 0
    assert capfd.readouterr().out == "leave\tno-image\n"


def test_worker_with_a_hanging_cache_is_killed_and_not_waited_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_worker, "PROBE_INTERVAL", 0.01)
    seconds = iter((0.0, hook_worker.HANG_AFTER - 1, hook_worker.HANG_AFTER))
    child = begin(hangs)
    with pytest.raises(HookWorkerTimeout) as late:
        child.wait_for_exit(lambda cache: next(seconds))
    assert late.value.cache == "/mnt/nvme/forestage"
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -signal.SIGKILL


def test_worker_past_its_time_limit_is_killed_and_not_waited_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_worker, "TIME_LIMIT_MARGIN", 0.0)

    def work(child: HookPipe) -> None:
        child.report_time_limit(0.05)
        signal.pause()

    with pytest.raises(HookWorkerTimeout) as late:
        begin(work).wait_for_exit(never)
    assert late.value.cache == ""


def test_worker_that_closed_its_pipe_but_does_not_exit_is_not_waited_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was killed with a file open of a server that hangs: its end waits for that."""
    monkeypatch.setattr(hook_worker, "TIME_LIMIT_MARGIN", 0.0)

    def work(child: HookPipe) -> None:
        child.report_time_limit(0.05)
        os.closerange(0, child.pipe_fd + 1)
        signal.pause()

    with pytest.raises(HookWorkerTimeout) as late:
        begin(work).wait_for_exit(never)
    assert late.value.cache == ""


def test_fork_worker_returns_none_and_leaks_no_descriptor_if_fork_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:
        raise BlockingIOError

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", fork)
    assert hook_worker.fork_worker(keeps_stdout=False) is None
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_calls_on_a_missing_hook_pipe_have_no_effect() -> None:
    hook_worker.NO_HOOK_PIPE.report_cache("/cache")
    hook_worker.NO_HOOK_PIPE.report_time_limit(1.0)
    hook_worker.NO_HOOK_PIPE.exit_worker()  # and the process goes on
