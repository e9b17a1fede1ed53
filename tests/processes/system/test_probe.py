"""Whether a file system answers: one process asks, and the lock that it holds is the memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.system import lock, probe
from forestage.system.probe import HangReport, ReportPhase


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "probes/disk"


class Asked:
    """What may hang: it does for as long as the test wants; notes who asks."""

    def __init__(self, folder: Path) -> None:
        self._pids = folder / "pids"
        self._go = folder / "go"
        os.mkfifo(self._go)
        self.hangs = False

    def __call__(self, at: ReportPhase) -> None:
        with self._pids.open("a") as pids:
            pids.write(f"{os.getpid()}\n")
        at("reads")
        if self.hangs:
            self._go.read_text()  # a FIFO, until somebody opens it for writing

    def answer(self) -> None:
        self._go.write_text("")
        self.hangs = False

    @property
    def pids(self) -> list[int]:
        return [*map(int, self._pids.read_text().split())]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(probe, "LIMIT", 0.2)
    found = Asked(tmp_path)
    yield found
    if found.hangs:
        found.answer()


def until_free(file: Path) -> None:
    with lock.held(file, 60):
        return


def test_probe_answer_is_reused_for_a_while(file: Path, asked: Asked) -> None:
    assert probe.find_hang(file, asked) is None
    asked.hangs = True
    assert probe.find_hang(file, asked) is None
    assert len(asked.pids) == 1
    asked.hangs = False


def test_file_system_is_probed_again_after_the_last_answer_expired(
    file: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "GOOD", 0.0)
    assert probe.find_hang(file, asked) is None
    assert probe.find_hang(file, asked) is None
    assert len(asked.pids) == 2


def test_one_process_probes_a_hanging_file_system_and_its_end_ends_the_hang(
    file: Path, asked: Asked
) -> None:
    asked.hangs = True
    for _ in range(3):
        found = probe.find_hang(file, asked)
        assert found is not None
        assert (found.phase, found.pid) == ("reads", asked.pids[0])
    assert probe.find_known_hang(file) is not None
    assert len(asked.pids) == 1
    asked.answer()
    until_free(file)
    assert probe.find_known_hang(file) is None
    assert probe.find_hang(file, asked) is None


def test_known_hang_of_a_file_system_is_reported_without_waiting(
    file: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.hangs = True
    probe.start_probe(file, asked)
    assert probe.find_known_hang(file) is not None, "it waits for who asks just now"
    assert probe.find_known_hang(file) is not None
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    assert probe.find_hang(file, asked) is not None


def test_probe_process_outlives_its_hook_and_the_hooks_process_group(
    file: Path, asked: Asked
) -> None:
    """slurmd kills the group, and what is killed remembers nothing."""
    asked.hangs = True
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            probe.find_hang(file, asked)
            os.killpg(0, signal.SIGKILL)
        finally:
            os._exit(1)  # never on into pytest
    os.waitpid(child, 0)
    assert probe.find_known_hang(file) is not None
    (pid,) = asked.pids
    assert os.getsid(pid) == pid


def test_killed_probe_process_is_no_hang_and_the_file_system_is_probed_again(
    file: Path, asked: Asked
) -> None:
    asked.hangs = True
    assert probe.find_hang(file, asked) is not None
    os.kill(asked.pids[0], signal.SIGKILL)
    until_free(file)
    assert probe.find_known_hang(file) is None
    asked.hangs = False
    assert probe.find_hang(file, asked) is None


def test_file_system_that_answers_with_an_error_does_not_hang(file: Path) -> None:
    def work(at: ReportPhase) -> None:
        at("writes")
        raise OSError(30, "Read-only file system")

    assert probe.find_hang(file, work) is None


def test_probe_process_that_only_waits_for_a_processor_is_no_hang(file: Path, asked: Asked) -> None:
    """On a busy node it only waits for its turn."""

    def work(at: ReportPhase) -> None:
        at("reads")
        while not stop.exists():
            pass

    stop = file.parent.parent / "stop"
    assert probe.find_hang(file, work) is None
    assert probe.find_known_hang(file) is None
    stop.touch()
    until_free(file)


def test_file_system_is_reported_as_no_hang_if_the_probe_file_cannot_be_created(
    tmp_path: Path, asked: Asked
) -> None:
    (tmp_path / "probes").touch()
    assert probe.find_hang(tmp_path / "probes/disk", asked) is None
    assert probe.find_known_hang(tmp_path / "probes/disk") is None


@pytest.mark.parametrize("text", ["", "reads", "reads x 1", "reads 1e30 1", "\udcff" * 70])
def test_probe_file_with_garbage_is_ignored_and_the_file_system_is_probed(
    file: Path, asked: Asked, text: str
) -> None:
    file.parent.mkdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert probe.find_hang(file, asked) is None
    assert len(asked.pids) == 1


def test_hang_report_has_the_seconds_since_the_hang_began(file: Path, asked: Asked) -> None:
    asked.hangs = True
    assert probe.find_hang(file, asked) is not None
    assert isinstance(found := probe.find_hang(file, asked), HangReport)
    assert found.seconds >= probe.LIMIT
