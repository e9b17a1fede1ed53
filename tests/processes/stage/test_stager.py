"""The stager's process: apart from its hook, one for each key, and every end has a message."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage import events, log
from forestage.cache import evict
from forestage.cache.layout import Cache
from forestage.cache.node import Node
from forestage.cache.part import PROCESS_NAME, PartRecord
from forestage.cache.source_image import SourceImage
from forestage.errors import CopyStopped, Declined, Failed
from forestage.slurm.job import Job
from forestage.sources.file import FileSource
from forestage.sources.source import OpenImage, SourceTruncated, SourceUnreadable
from forestage.stage import chunks, copy_queue, engines, pipeline, source_reader, stager
from forestage.stage.task import CopyTask
from forestage.system import as_user, forked_child, lock
from forestage.system.daemon import StartChannel, StartReport
from node import until

Said = Callable[[], list[str]]

CHUNK = 1 << 16
CONTENT = b"container " * (CHUNK // 4)

Patch = pytest.MonkeyPatch


@pytest.fixture
def task(
    shared: Path, look: Callable[[Path], OpenImage], staging_node: Node, asking: Job
) -> Iterator[CopyTask]:
    (shared / "image.sqsh").write_bytes(CONTENT)
    found = look(shared / "image.sqsh")
    yield CopyTask(staging_node, asking, found)
    found.close()


@pytest.fixture
def said(tmp_path: Path, monkeypatch: Patch) -> Said:
    """What is logged in whatever process."""
    file = tmp_path / "log"
    file.touch()

    def say(line: str, by_slurm: bool) -> None:
        with file.open("a") as lines:
            lines.write(line + "\n")

    monkeypatch.setattr(log, "write_log_line", say)
    return lambda: file.read_text().splitlines()


def messages(task: CopyTask) -> list[StartReport]:
    """Starts a stager and listens until its end."""
    heard = []
    with stager.start_stager(task) as channel:
        while (message := channel.receive_message(600)) != StartReport("died"):
            assert message is not None
            heard.append(message)
    return heard


def fail_with(error: BaseException, monkeypatch: Patch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "run_copy", fail)


def io(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "reason", "node_failed"),
    [
        (Failed("copy", "rsync: exit 23"), "copy", True),
        (Declined("acl", "no ACL here"), "acl", False),
        (SourceTruncated("/lustre/a"), "changed", False),
        (CopyStopped(), "stopped", False),
        (as_user.ChildTimeout("no answer"), "source-hangs", False),
        (lock.LockTimeout("space.lock is held"), "busy", True),
        (SourceUnreadable("/lustre/a", io(errno.ESTALE)), "changed", False),
        (SourceUnreadable("/lustre/a", io(errno.EIO)), "source-error", False),
        (io(errno.ENOSPC), "no-room", False),
        (io(errno.EDQUOT), "no-room", False),
        (io(errno.EIO), "io", True),
        (io(errno.EROFS), "io", True),
    ],
)
def test_failed_copy_sends_a_message_and_records_an_event_and_a_log_line(
    task: CopyTask, monkeypatch: Patch, said: Said, error: Exception, reason: str, node_failed: bool
) -> None:
    fail_with(error, monkeypatch)
    (last,) = messages(task)
    assert (last.state, last.reason, last.node_failed) == ("failed", reason, node_failed)
    assert last.detail
    (event,) = events.read_events(task.node.places.events)
    assert (event.hook, event.job, event.outcome.reason) == ("stager", 7, reason)
    assert event.outcome.result == ("failed" if node_failed else "declined")
    assert (event.outcome.bytes, event.outcome.size) == (0, len(CONTENT))
    (line,) = said()
    assert line.startswith("stager job=7 ")
    assert f"reason={reason}" in line


def test_published_copy_records_an_event_and_a_log_line(task: CopyTask, said: Said) -> None:
    """The hook that asked may be long gone."""
    assert messages(task) == [StartReport("published")]
    (event,) = events.read_events(task.node.places.events)
    outcome = event.outcome
    assert (event.hook, outcome.result, outcome.key) == ("stager", "copied", task.key)
    assert outcome.image == task.image.path
    assert outcome.bytes == outcome.size == len(CONTENT)
    assert outcome.resumed == 0
    assert 0 < outcome.copying <= outcome.wait
    assert "result=copied" in said()[-1]


@pytest.mark.parametrize(
    ("error", "one_chunk", "kept"),
    [
        (CopyStopped(), True, True),
        (io(errno.EIO), True, True),
        (Failed("copy", "rsync"), True, True),
        # No use to whoever comes next: no chunk, other bytes, or space that others need.
        (CopyStopped(), False, False),
        (io(errno.EIO), False, False),
        (SourceTruncated("/lustre/a"), True, False),
        (io(errno.ENOSPC), True, False),
    ],
)
def test_part_of_a_failed_copy_is_kept_only_if_the_copy_can_be_resumed(
    task: CopyTask, monkeypatch: Patch, error: Exception, one_chunk: bool, kept: bool
) -> None:
    def half(task: CopyTask, *_: object) -> None:
        pipeline.claim_part(task)
        task.part.map.write_bytes(b"\1" * 16 * one_chunk + bytes(32))
        raise error

    monkeypatch.setattr(pipeline, "run_copy", half)
    assert messages(task)[-1].state == "failed"
    assert task.part.directory.exists() is kept


def test_stager_finds_an_entry_that_another_stager_has_just_published(
    task: CopyTask, publish: Callable[[SourceImage], object], said: Said
) -> None:
    publish(task.image)
    assert messages(task) == [StartReport("found")]
    assert not list(task.node.cache.parts.iterdir())
    assert said() == []


def test_stager_reports_the_copys_error_though_its_event_cannot_be_written(
    task: CopyTask, monkeypatch: Patch, said: Said
) -> None:
    """A bug instead would count as three killed copies, and as a failure of the node."""

    def full(*_: object) -> None:
        raise io(errno.ENOSPC)

    fail_with(SourceTruncated("/lustre/a"), monkeypatch)
    monkeypatch.setattr(events, "record_events", full)
    last = messages(task)[-1]
    assert (last.reason, last.node_failed) == ("changed", False)
    assert "result=unrecorded" in said()[-1]


def test_stager_leaves_the_hooks_session_output_and_locks_before_its_first_message(
    tmp_path: Path, task: CopyTask, monkeypatch: Patch
) -> None:
    """Before its first word: the hook goes on then, and Slurm may kill the hook's session."""
    left: list[str] = []
    send = StartChannel.send

    def look_around_and_send(channel: StartChannel, message: StartReport) -> None:
        files = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                files.append(os.readlink(f"/proc/self/fd/{name}"))
        facts = {
            "session": os.getsid(0) == os.getpid() == os.getpgid(0),
            "left": left,
            "name": Path("/proc/self/comm").read_text().strip(),
            "folder": str(Path.cwd()),
            "files": sorted(name for name in files if not name.startswith("socket:")),
        }
        (tmp_path / message.state).write_bytes(msgspec.json.encode(facts))
        send(channel, message)

    monkeypatch.setattr(StartChannel, "send", look_around_and_send)
    monkeypatch.setattr(forked_child, "leave_job_cgroups", lambda _, leaf: left.append(leaf))
    monkeypatch.setattr(pipeline, "run_copy", lambda *_: None)
    with lock.held(task.node.cache.space_lock, 0):
        assert messages(task) == [StartReport("published")]
    assert msgspec.json.decode((tmp_path / "started").read_bytes()) == {
        "session": True,
        "left": ["copy"],
        "name": PROCESS_NAME,
        "folder": "/",
        "files": [*["/dev/null"] * 3, task.image.path],
    }


def test_second_stager_of_a_key_reports_busy_and_copies_nothing(task: CopyTask) -> None:
    with lock.held(task.node.cache.key_lock(task.key), 0):
        assert messages(task) == [StartReport("busy")]
    assert not list(task.node.cache.parts.iterdir())


@pytest.mark.parametrize("error", [None, RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(0)])
def test_stager_never_returns_into_the_hooks_code(
    tmp_path: Path, task: CopyTask, monkeypatch: Patch, said: Said, error: BaseException | None
) -> None:
    if error is not None:
        fail_with(error, monkeypatch)
    here = os.getpid()
    try:
        heard = messages(task)
    finally:
        if os.getpid() != here:
            (tmp_path / "two of us").touch()
            os._exit(1)
    assert [message.state for message in heard] == ["died" if error else "published"]
    assert not (tmp_path / "two of us").exists()
    assert lock.is_free(task.node.cache.key_lock(task.key))
    assert error is None or repr(error) in said()[-1]


def hang() -> None:
    time.sleep(600)


def spin() -> None:
    while True:
        pass


PHASES = {
    "source": (FileSource, "open"),
    "needs": (engines.ChunkEngine, "needed_bytes"),
    "room": (evict, "make_room"),
    "old part": (pipeline, "clear_wrong_chunks"),
    "space": (engines.ChunkEngine, "reserve"),
    "copying": (chunks, "copy_chunks"),
    "verifying": (FileSource, "check_unchanged"),
    "rights": (pipeline, "_mirror_access"),
    "publishing": (Cache, "publish"),
    "redirects": (stager, "_mount_for_waiting_jobs"),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("wait", [hang, spin])
def test_stager_ends_on_sigterm_in_every_phase_of_a_copy(
    tmp_path: Path, task: CopyTask, monkeypatch: Patch, phase: str, wait: Callable[[], None]
) -> None:
    here = tmp_path / "here"

    def never_end(*_: object, **__: object) -> None:
        here.touch()
        wait()

    monkeypatch.setattr(*PHASES[phase], never_end)
    monkeypatch.setattr(stager, "ENDS_WITHIN", 0.1)
    with stager.start_stager(task) as channel:
        until(here.exists, "the stager to come there")
        os.kill(channel.pid, signal.SIGTERM)
        heard = list(iter(lambda: channel.receive_message(600), StartReport("died")))
    is_over = phase == "redirects"
    stopped = StartReport("failed", "stopped", str(CopyStopped()))
    assert heard[0] == (StartReport("published") if is_over else stopped)
    until(lambda: lock.is_free(task.node.cache.key_lock(task.key)), "its lock to be free")
    owner = task.part.find_record()
    assert is_over or (owner is not None and owner.stopped)


def test_queued_stager_ends_on_sigterm(task: CopyTask, monkeypatch: Patch) -> None:
    monkeypatch.setattr(copy_queue, "_choose_turn_now", lambda *_: "wait")
    with stager.start_stager(task) as channel:
        until(lambda: task.part.find_record() is not None, "the stager to be in the queue")
        os.kill(channel.pid, signal.SIGTERM)
        assert channel.receive_message(600) == StartReport("failed", "stopped", str(CopyStopped()))
        assert channel.receive_message(600) == StartReport("died")


class SignalledEvent(threading.Event):
    """An event of a process that is sent SIGTERM while it sets the event."""

    def set(self) -> None:
        with self._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        super().set()


def test_stager_ends_on_a_second_sigterm_while_the_first_is_handled(
    task: CopyTask, monkeypatch: Patch
) -> None:
    def wait(_node: Node, _key: str, _owner: PartRecord, stop: threading.Event) -> PartRecord:
        stop.__class__ = SignalledEvent
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.is_set():
            time.sleep(0.01)
        raise CopyStopped

    monkeypatch.setattr(copy_queue, "wait_for_slot", wait)
    with stager.start_stager(task) as channel:
        try:
            assert channel.receive_message(60) == StartReport(
                "failed", "stopped", str(CopyStopped())
            )
        finally:
            os.kill(channel.pid, signal.SIGKILL)


def test_error_of_a_stager_that_still_shares_the_hooks_stderr_is_only_logged(
    task: CopyTask, said: Said, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: CopyTask) -> CopyTask:
        raise OSError(errno.EMFILE, "no descriptor")

    monkeypatch.setattr(CopyTask, "with_descriptor", fail)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    with stager.start_stager(task) as channel:
        assert channel.receive_message(60) == StartReport("died", detail="[Errno 24] no descriptor")
        until(lambda: "no descriptor" in str(said()), "the line in the log")
    assert capfd.readouterr() == ("", "")


def test_exception_in_a_copy_thread_is_logged(
    task: CopyTask, said: Said, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    def die(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(source_reader, "read_piece", die)
    with stager.start_stager(task) as channel:
        assert channel.receive_message(60) is not None
        until(lambda: "died: RuntimeError('unforeseen') at " in str(said()), "the line in the log")
    assert capfd.readouterr() == ("", "")
