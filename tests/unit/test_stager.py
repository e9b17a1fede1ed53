"""The stager's life: what its end means, who is served first, and that it leaves the hook alone."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forestage import events, log
from forestage.cache.image import Image
from forestage.cache.node import Node
from forestage.cache.part import PROCESS_NAME, Owner, Part, boot_id
from forestage.errors import Declined, Failed
from forestage.peers.stats import Counters
from forestage.slurm.job import Job
from forestage.stage import pipeline, stager
from forestage.stage.pipeline import Task
from forestage.stage.stager import HANGS, Message
from forestage.system import as_user, lock

CHUNK = 1 << 16
CONTENT = b"container " * (CHUNK // 4)

Patch = pytest.MonkeyPatch


@pytest.fixture
def task(
    shared: Path, look: Callable[[Path], OpenImage], staging_node: Node, asking: Job
) -> Iterator[Task]:
    (shared / "image.sqsh").write_bytes(CONTENT)
    found = look(shared / "image.sqsh")
    yield Task(staging_node, asking, found)
    found.close()


@pytest.fixture
def said(monkeypatch: Patch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "say", lambda line, by_slurm: lines.append(line))
    return lines


def serve(task: Task) -> Message:
    return stager._serve(task, threading.Event())


def io(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "reason", "ours"),
    [
        (Failed("copy", "rsync: exit 23"), "copy", True),
        (Declined("acl", "no ACL here"), "acl", False),
        (source.Truncated(), "changed", False),
        (Stopped(), "stopped", False),
        (as_user.TooSlow("no answer"), "source-hangs", False),
        (lock.Busy("space.lock is held"), "busy", True),
        (source.Unreadable(io(errno.ESTALE)), "changed", False),
        (source.Unreadable(io(errno.EIO)), "source-error", False),
        (io(errno.ENOSPC), "no-room", False),
        (io(errno.EDQUOT), "no-room", False),
        (io(errno.EIO), "io", True),
        (io(errno.EROFS), "io", True),
    ],
)
def test_what_ends_a_copy_has_its_word_its_event_and_no_entry(
    task: Task, monkeypatch: Patch, said: list[str], error: Exception, reason: str, ours: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "fetch", fail)
    word = serve(task)
    assert (word.state, word.reason, word.ours) == ("failed", reason, ours)
    assert word.detail
    assert not list(task.node.cache.entries.iterdir())
    (event,) = events.read(task.node.places.events)
    assert (event.hook, event.job, event.outcome.reason) == ("stager", 7, reason)
    assert event.outcome.result == ("failed" if ours else "declined")
    assert (event.outcome.bytes, event.outcome.size) == (0, len(CONTENT))
    (line,) = said
    assert line.startswith("stager job=7 ")
    assert f"reason={reason}" in line


@pytest.mark.parametrize(
    ("error", "one_chunk", "kept"),
    [
        (Stopped(), True, True),
        (io(errno.EIO), True, True),
        (Failed("copy", "rsync"), True, True),
        # No use to whoever comes next: no chunk, other bytes, or space that others need.
        (Stopped(), False, False),
        (io(errno.EIO), False, False),
        (source.Truncated(), True, False),
        (io(errno.ENOSPC), True, False),
    ],
)
def test_what_can_be_resumed_stays_and_nothing_else(
    task: Task, monkeypatch: Patch, said: list[str], error: Exception, one_chunk: bool, kept: bool
) -> None:
    def half(*_: object) -> None:
        if one_chunk:
            with task.part.map.open("r+b") as file:
                file.write(b"\1" * 16)
        raise error

    monkeypatch.setattr(pipeline, "fetch", half)
    assert serve(task).state == "failed"
    assert task.part.directory.exists() is kept


def test_a_copy_tells_what_was_given_away_meanwhile_and_not_what_was_before(
    task: Task, monkeypatch: Patch, said: list[str]
) -> None:
    peers = msgspec.structs.replace(task.node.config.peers, enabled=True)
    config = msgspec.structs.replace(task.node.config, peers=peers)
    task = msgspec.structs.replace(task, node=msgspec.structs.replace(task.node, config=config))
    given = Counters(task.node.places.peer, since=1.0)
    given.uploaded(task.key, 100)
    given.uploaded("another", 1000)
    given.flush()
    fetch = pipeline.fetch

    def meanwhile(*arguments: Any) -> int:
        given.uploaded(task.key, 11)
        given.flush()
        return fetch(*arguments)

    monkeypatch.setattr(pipeline, "fetch", meanwhile)
    assert serve(task).state == "published"
    (event,) = events.read(task.node.places.events)
    assert event.outcome.served == 11


def test_a_copy_has_its_own_event_and_line(task: Task, said: list[str]) -> None:
    """The hook that asked may be long gone."""
    assert serve(task) == Message("published")
    (event,) = events.read(task.node.places.events)
    outcome = event.outcome
    assert (event.hook, outcome.result, outcome.key) == ("stager", "copied", task.key)
    assert (outcome.image, outcome.bytes, outcome.size) == (
        task.image.path,
        len(CONTENT),
        len(CONTENT),
    )
    assert outcome.resumed == 0
    assert 0 < outcome.copying <= outcome.wait
    assert "result=copied" in said[-1]


def test_what_another_stager_published_just_now_is_found(
    task: Task, publish: Callable[[Image], object], said: list[str]
) -> None:
    publish(task.image)
    assert serve(task) == Message("found")
    assert not list(task.node.cache.parts.iterdir())
    assert said == []


def test_an_event_that_cannot_be_written_changes_nothing(
    task: Task, monkeypatch: Patch, said: list[str]
) -> None:
    """The hook takes it for three killed copies, `Failed`: with `on_error: drain` the node goes."""

    def full(*_: object) -> None:
        raise io(errno.ENOSPC)

    def cut(*_: object) -> None:
        raise source.Truncated

    monkeypatch.setattr(pipeline, "fetch", cut)
    monkeypatch.setattr(events, "record", full)
    word = serve(task)
    assert (word.reason, word.ours) == ("changed", False)


def test_words_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [Message("started"), Message("failed", "no-room", "ü" * 2000, ours=False)]
    for word in words:
        stager._tell(theirs, word)
    assert [stager.hear(ours, 600), stager.hear(ours, 600)] == words
    assert stager.hear(ours, 0) is None
    theirs.close()
    with pytest.raises(EOFError):
        stager.hear(ours, 600)
    ours.close()


def test_a_hook_that_has_gone_on_is_no_reason_to_stop() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    stager._tell(theirs, Message("published"))
    theirs.close()


def owner_of(wanted: Image, since: float, boot: str = "") -> Owner:
    return Owner(1, boot or boot_id(), wanted, CHUNK, "chunks", 7, since)


@pytest.mark.parametrize(
    ("others", "ahead"),
    [
        pytest.param([], 0, id="nobody"),
        pytest.param([("a", 1.0, "", True), ("b", 2.0, "", True)], 2, id="asked before"),
        pytest.param([("a", 9.0, "", True)], 0, id="asked after"),
        pytest.param([("0", 5.0, "", True)], 1, id="at once, by name"),
        pytest.param([("z", 5.0, "", True)], 0, id="at once, by name, after"),
        pytest.param([("a", 1.0, "", False)], 0, id="dead"),
        pytest.param([("a", 1.0, "older", True)], 0, id="of another boot, whose clock is another"),
        pytest.param([("a", None, "", True)], 0, id="not claimed yet"),
    ],
)
def test_the_queue_is_in_the_order_of_asking(
    task: Task, others: list[tuple[str, float | None, str, bool]], ahead: int
) -> None:
    cache = task.node.cache
    mine = owner_of(task.image, 5.0)
    task.part.write_owner(mine)
    with contextlib.ExitStack() as held:
        held.enter_context(lock.held(cache.key_lock(task.key), 0))
        for key, since, boot, alive in others:
            part = Part(cache.part_dir(key))
            part.directory.mkdir()
            if since is not None:
                part.write_owner(owner_of(task.image, since, boot))
            if alive:
                held.enter_context(lock.held(cache.key_lock(key), 0))
        assert stager._ahead(task, mine) == ahead


@pytest.mark.parametrize(
    ("phase", "still", "ahead"),
    [("copying", HANGS + 1, 0), ("copying", HANGS - 1, 1), ("queued", HANGS + 1, 1)],
)
def test_a_copy_whose_source_hangs_keeps_nobody_waiting(
    task: Task, monkeypatch: Patch, phase: str, still: float, ahead: int
) -> None:
    cache = task.node.cache
    mine = owner_of(task.image, 5.0)
    task.part.write_owner(mine)
    other = Part(cache.part_dir("other"))
    other.write_owner(msgspec.structs.replace(owner_of(task.image, 1.0), phase=phase))
    other.map.touch()
    monkeypatch.setattr(task.node.clock, "wall", lambda: other.map.stat().st_mtime + still)
    with lock.held(cache.key_lock("other"), 0):
        assert stager._ahead(task, mine) == ahead


@pytest.mark.parametrize(("most", "waits"), [(1, 3), (2, 2), (3, 1), (4, 0)])
def test_no_more_copies_at_once_than_the_admin_wants(
    task: Task, monkeypatch: Patch, most: int, waits: int
) -> None:
    config = msgspec.structs.replace(task.node.config, max_copies=most)
    task = msgspec.structs.replace(task, node=msgspec.structs.replace(task.node, config=config))
    ahead = iter([3, 2, 1, 0])
    waited: list[float] = []

    class Stop:
        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            return False

    monkeypatch.setattr(stager, "_ahead", lambda *_: next(ahead))
    stager._await_turn(task, owner_of(task.image, 1.0), Stop())  # type: ignore[arg-type]
    assert len(waited) == waits


def test_who_is_stopped_in_the_queue_leaves_it(task: Task, monkeypatch: Patch) -> None:
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(stager, "_ahead", lambda *_: 99)
    with pytest.raises(Stopped):
        stager._await_turn(task, owner_of(task.image, 1.0), stop)


def test_a_stopped_copy_in_the_queue_leaves_nothing(
    task: Task, monkeypatch: Patch, said: list[str]
) -> None:
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(stager, "_ahead", lambda *_: 99)
    assert stager._serve(task, stop).reason == "stopped"
    assert not list(task.node.cache.parts.iterdir())


def test_progress_counts_what_this_copy_did(task: Task, monkeypatch: Patch) -> None:
    pipeline.claim(task)
    owner = msgspec.structs.replace(
        owner_of(task.image, 1.0), phase="copying", began=10.0, resumed=CHUNK
    )
    task.part.map.write_bytes(b"\1" * 32 + bytes(16))
    monkeypatch.setattr(task.node.clock, "monotonic", lambda: 14.0)
    assert stager.progress_line(task, owner) == (
        f"image={task.image.path} key={task.key} copied={2 * CHUNK} of={len(CONTENT)} rate=16KiB/s"
    )


def test_a_long_copy_says_how_far_it_is_and_then_no_more(
    task: Task, monkeypatch: Patch, said: list[str]
) -> None:
    pipeline.claim(task)
    spoken = threading.Event()
    monkeypatch.setattr(stager, "SAY_EVERY", 0.001)

    def say(line: str, by_slurm: bool) -> None:
        said.append(line)
        spoken.set()

    monkeypatch.setattr(log, "say", say)
    with stager._spoken(task, owner_of(task.image, 1.0)):
        assert spoken.wait(600)
    number = len(said)
    assert said[0].startswith(f"stager job=7 image={task.image.path} ")
    assert not [thread for thread in threading.enumerate() if thread.name == "speak"]
    assert len(said) == number


@pytest.fixture
def last_words(task: Task) -> Callable[[], list[str]]:
    """Starts a stager and gives the states of its words until its end."""

    def listening() -> list[str]:
        words = []
        with stager.start(task) as line, contextlib.suppress(EOFError):
            while True:
                word = stager.hear(line, 600)
                assert word is not None
                words.append(word.state)
        return words

    return listening


def test_the_stager_leaves_the_hooks_session_output_and_locks(
    tmp_path: Path, task: Task, last_words: Callable[[], list[str]], monkeypatch: Patch
) -> None:
    def look_around(*_: object) -> None:
        files = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                files.append(os.readlink(f"/proc/self/fd/{name}"))
        facts = {
            "session": os.getsid(0) == os.getpid() == os.getpgid(0),
            "name": Path("/proc/self/comm").read_text().strip(),
            "files": sorted(name for name in files if not name.startswith("socket:")),
        }
        (tmp_path / "facts").write_bytes(msgspec.json.encode(facts))

    monkeypatch.setattr(stager, "_serve", lambda *_: (look_around(), Message("published"))[1])
    with lock.held(task.node.cache.space_lock, 0):
        assert last_words() == ["started", "published"]
    facts = msgspec.json.decode((tmp_path / "facts").read_bytes())
    assert facts == {
        "session": True,
        "name": PROCESS_NAME,
        "files": sorted(
            [*["/dev/null"] * 3, task.image.path, str(task.node.cache.key_lock(task.key))]
        ),
    }


def test_a_key_that_has_a_stager_gets_no_second_one(
    task: Task, last_words: Callable[[], list[str]]
) -> None:
    with lock.held(task.node.cache.key_lock(task.key), 0):
        assert last_words() == ["busy"]
    assert not list(task.node.cache.parts.iterdir())


@pytest.mark.parametrize("error", [None, RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(0)])
def test_whatever_happens_the_stager_never_comes_back_into_the_hooks_code(
    tmp_path: Path,
    last_words: Callable[[], list[str]],
    monkeypatch: Patch,
    task: Task,
    error: BaseException | None,
) -> None:
    def fail(*_: object) -> Message:
        if error is not None:
            raise error
        return Message("published")

    here = os.getpid()
    monkeypatch.setattr(stager, "_serve", fail)
    words = None
    try:
        words = last_words()
    finally:
        if os.getpid() != here:
            (tmp_path / "two of us").touch()
            os._exit(1)
    assert words == (["started"] if error else ["started", "published"])
    assert not (tmp_path / "two of us").exists()
    assert lock.is_free(task.node.cache.key_lock(task.key))
