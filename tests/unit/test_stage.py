"""Is it worth the wait: one copy for all who ask, no job waits in vain, none for ever."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.cache.image import Image
from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import Lease, Use
from forestage.cache.node import Node
from forestage.cache.part import Owner, boot_id
from forestage.clock import Clock, Deadline
from forestage.errors import Declined, Failed
from forestage.slurm.job import Job
from forestage.stage import pipeline
from forestage.stage import wait as stage
from forestage.stage.pipeline import Task
from forestage.stage.wait import DOUBT, OBSERVE, TRIES, Eta, Staged, remaining
from forestage.system import lock
from forestage.system.as_user import User
from forestage.units import Amount

CHUNK = 1 << 16
CONTENT = b"container " * (CHUNK // 4)
Patch = pytest.MonkeyPatch
Staging = Callable[..., Staged]


@pytest.fixture
def looked(shared: Path, look: Callable[[Path], OpenImage]) -> Iterator[OpenImage]:
    (shared / "image.sqsh").write_bytes(CONTENT)
    found = look(shared / "image.sqsh")
    yield found
    found.close()


@pytest.fixture
def staging(staging_node: Node, asking: Job, looked: OpenImage) -> Staging:
    def run_stage(seconds: float = 3600.0, **config: object) -> Staged:
        changed = msgspec.structs.replace(staging_node.config, **config)
        node = msgspec.structs.replace(staging_node, config=changed)
        return stage.stage(node, asking, looked, Deadline.after(seconds, node.clock))

    return run_stage


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: Patch) -> Callable[[], int]:
    """Counts copies in whatever process; a file is what all of them see."""
    counter = tmp_path / "copies"
    counter.touch()
    real = pipeline.fetch

    def counting(*arguments: object) -> None:
        with counter.open("ab") as file:
            file.write(b"x")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "fetch", counting)
    return lambda: counter.stat().st_size


def test_an_image_is_copied_once_and_found_ever_after(
    cache: Cache, staging: Staging, copies: Callable[[], int]
) -> None:
    first, second = staging(), staging()
    assert (first.result, second.result) == ("copied", "hit")
    assert second.entry == first.entry
    assert cache.image(first.entry.key).read_bytes() == CONTENT
    assert copies() == 1
    assert not list(cache.parts.iterdir())


def test_a_hit_starts_no_process(
    staging: Staging,
    looked: OpenImage,
    publish: Callable[[Image], Entry],
    monkeypatch: Patch,
) -> None:
    publish(looked.image)
    monkeypatch.setattr(os, "fork", None)
    assert staging().result == "hit"
    assert staging(seconds=0).result == "hit"


def test_who_waited_for_a_copy_joins_it(
    cache: Cache,
    looked: OpenImage,
    staging_node: Node,
    staging: Staging,
    copies: Callable[[], int],
    monkeypatch: Patch,
) -> None:
    """The lock is somebody else's; while this hook waits the entry appears."""
    held = lock.held(cache.key_lock(looked.image.key), 0)
    waits: list[float] = []
    part = cache.part(looked.image.key)
    part.directory.mkdir()
    part.image.write_bytes(CONTENT)
    entry = Entry(looked.image.key, looked.image.identity, looked.image.access, 1.0, "chunks")

    def publish_then_let_go(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            cache.publish(entry)
            held.__exit__(None, None, None)

    monkeypatch.setattr(staging_node.clock, "sleep", publish_then_let_go)
    with held:
        staged = staging()
    assert (staged.result, staged.entry, len(waits)) == ("joined", entry, 3)
    assert copies() == 0


def test_what_was_published_between_the_look_and_the_lock_is_joined(
    cache: Cache, looked: OpenImage, staging: Staging, monkeypatch: Patch, copies: Callable[[], int]
) -> None:
    entry = staging().entry
    find = Cache.find
    answers = iter([None])
    here = os.getpid()

    def late(self: Cache, wanted: Image) -> Entry | None:
        return next(answers, entry) if os.getpid() == here else find(self, wanted)

    monkeypatch.setattr(Cache, "find", late)
    staged = staging()
    assert (staged.result, staged.entry) == ("joined", entry)
    assert copies() == 1


def test_a_copy_under_way_that_does_not_end_is_not_waited_for_for_ever(
    cache: Cache, looked: OpenImage, staging: Staging
) -> None:
    with lock.held(cache.key_lock(looked.image.key), 0), pytest.raises(Declined) as caught:
        staging(seconds=0.05)
    assert (caught.value.reason, isinstance(caught.value, Failed)) == ("deadline", False)


def killed(times: int, counter: Path, monkeypatch: Patch) -> None:
    """The first stagers die in their copy as of kill -9."""
    real = pipeline.fetch
    counter.touch()

    def die(*arguments: object) -> None:
        with counter.open("ab") as file:
            file.write(b"x")
        if counter.stat().st_size <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "fetch", die)


@pytest.mark.parametrize("times", [1, TRIES - 1])
def test_a_stager_that_is_killed_is_replaced_while_the_job_waits(
    tmp_path: Path, cache: Cache, staging: Staging, monkeypatch: Patch, times: int
) -> None:
    killed(times, tmp_path / "lives", monkeypatch)
    staged = staging()
    assert staged.result == "copied"
    assert cache.image(staged.entry.key).read_bytes() == CONTENT
    assert (tmp_path / "lives").stat().st_size == times + 1


def test_a_stager_that_is_killed_again_and_again_is_our_failure(
    tmp_path: Path, cache: Cache, staging: Staging, monkeypatch: Patch
) -> None:
    killed(99, tmp_path / "lives", monkeypatch)
    with pytest.raises(Failed, match=f"killed {TRIES} times") as caught:
        staging()
    assert caught.value.reason == "copy"
    assert (tmp_path / "lives").stat().st_size == TRIES
    assert not list(cache.entries.iterdir())


def test_a_killed_stager_whose_lock_is_not_free_at_once_counts_once(
    looked: OpenImage, staging: Staging, publish: Callable[[Image], Entry], monkeypatch: Patch
) -> None:
    """The kernel closes its line first: the next stager may find the key still taken, and go."""
    ended = iter([("copied", None), ("joined", None)] * (TRIES - 1))

    def once(*_: object) -> tuple[str, None]:
        if (answer := next(ended, None)) is not None:
            return answer
        publish(looked.image)
        return "copied", None

    monkeypatch.setattr(stage, "_once", once)
    assert staging().result == "copied"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_a_bug_in_the_stager_is_our_failure_and_publishes_nothing(
    cache: Cache, staging: Staging, monkeypatch: Patch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "fetch", fail)
    with pytest.raises(Failed) as caught:
        staging()
    assert caught.value.reason == "copy"
    assert not list(cache.entries.iterdir())


@pytest.mark.parametrize("error", [Failed("copy", "rsync: exit 23"), Declined("changed", "moved")])
def test_what_the_stager_says_is_what_the_hook_raises(
    staging: Staging, monkeypatch: Patch, error: Declined
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "fetch", fail)
    with pytest.raises(Declined) as caught:
        staging()
    assert type(caught.value) is type(error)
    assert (caught.value.reason, str(caught.value)) == (error.reason, str(error))


def test_without_room_nothing_is_copied(
    cache: Cache, staging: Staging, copies: Callable[[], int]
) -> None:
    with pytest.raises(Declined) as caught:
        staging(max_size=Amount(size=1))
    assert (caught.value.reason, isinstance(caught.value, Failed)) == ("no-room", False)
    assert copies() == 0
    assert not list(cache.entries.iterdir())
    assert not list(cache.parts.iterdir())


def test_a_part_that_a_dead_copier_left_is_not_taken_for_a_copy(
    cache: Cache, looked: OpenImage, staging: Staging
) -> None:
    part = cache.part(looked.image.key)
    part.directory.mkdir()
    part.image.write_bytes(b"x" * len(CONTENT))
    part.map.write_bytes(b"\1" * 48)
    assert cache.image(staging().entry.key).read_bytes() == CONTENT


class Hands(Clock):
    """A clock that goes where a test puts it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("copied", "rest", "took", "expected"),
    [(100, 100, 10.0, 10.0), (100, 50, 10.0, 5.0), (1, 99, 1.0, 99.0), (100, 0, 10.0, 0.0)],
)
def test_the_rest_takes_as_long_as_the_beginning(
    copied: int, rest: int, took: float, expected: float
) -> None:
    assert remaining(copied, rest, took) == expected


@given(st.integers(-5, 0), st.integers(0), st.floats(0, 1e6))
def test_nothing_is_told_of_a_copy_that_has_not_begun(copied: int, rest: int, took: float) -> None:
    assert remaining(copied, rest, took) is None


def under_way(cache: Cache, wanted: Image, there: int, chunks: int, **changes: object) -> None:
    """A part of which so many of its chunks are in."""
    part = cache.part(wanted.key)
    owner = Owner(
        pid=1,
        boot=boot_id(),
        image=wanted,
        chunk=wanted.size // chunks,
        engine="chunks",
        job=7,
        since=900.0,
        phase="copying",
        began=1000.0 - 10,
    )
    part.write_owner(msgspec.structs.replace(owner, **changes))
    part.map.write_bytes(b"\1" * 16 * there + bytes(16) * (chunks - there))


SIZE = 1000


@pytest.fixture
def living(monkeypatch: Patch) -> None:
    """The stagers that these tests make up are taken for processes that run."""
    monkeypatch.setattr(Owner, "lives", lambda _: True)


@pytest.mark.usefixtures("living")
@pytest.mark.parametrize(
    ("there", "changes", "left", "hopeless"),
    [
        # Ten chunks; in 10 s five came, so the rest takes 10 s.
        pytest.param(5, {}, 10.0, False, id="just in time"),
        pytest.param(5, {}, 9.0, False, id="a tenth too late"),
        pytest.param(5, {}, 10.0 / DOUBT + 0.1, False, id="if it becomes a little faster"),
        pytest.param(5, {}, 10.0 / DOUBT - 0.1, True, id="even if it becomes a little faster"),
        pytest.param(1, {}, 60.0, True, id="far too slow"),
        pytest.param(1, {}, 90.0, False, id="slow, but there is time"),
        pytest.param(10, {}, 0.1, False, id="all there, not yet published"),
        pytest.param(0, {}, 1.0, False, id="nothing there yet: no rate to judge by"),
        # What was there before this copy began says nothing about its rate.
        pytest.param(5, {"resumed": 400}, 10.0, True, id="resumed"),
        pytest.param(5, {"resumed": 500}, 1.0, False, id="resumed, nothing new yet"),
        pytest.param(1, {"began": 1000 - OBSERVE + 0.01}, 1.0, False, id="too early to say"),
        pytest.param(1, {"began": 1000 - OBSERVE}, 1.0, True, id="late enough to say"),
        pytest.param(1, {"phase": "queued", "began": 0.0}, 1.0, False, id="queued"),
        pytest.param(10, {}, 0.0, True, id="no time left"),
        pytest.param(1, {"phase": "queued"}, 0.0, True, id="queued, no time left"),
    ],
)
def test_no_job_waits_for_what_cannot_come_in_time(
    staging_node: Node,
    make_image: Callable[..., Image],
    there: int,
    changes: dict[str, object],
    left: float,
    hopeless: bool,
) -> None:
    node = msgspec.structs.replace(staging_node, clock=Hands())
    wanted = make_image(size=SIZE)
    under_way(node.cache, wanted, there, 10, **changes)
    assert Eta(node, wanted, Deadline.after(left, node.clock)).hopeless() is hopeless


@pytest.mark.parametrize(("left", "hopeless"), [(0.01, False), (0.0, True)])
def test_a_copy_that_has_not_said_anything_yet_is_waited_for_until_the_deadline(
    staging_node: Node, make_image: Callable[..., Image], left: float, hopeless: bool
) -> None:
    node = msgspec.structs.replace(staging_node, clock=Hands())
    outlook = Eta(node, make_image(), Deadline.after(left, node.clock))
    assert outlook.hopeless() is hopeless


@pytest.mark.usefixtures("living")
def test_the_user_is_told_how_far_it_is_and_how_long_it_takes(
    staging_node: Node, make_image: Callable[..., Image]
) -> None:
    node = msgspec.structs.replace(staging_node, clock=Hands())
    wanted = make_image(size=SIZE)
    outlook = Eta(node, wanted, Deadline.after(1, node.clock))
    assert outlook.told() == "0 B of 1000 B of /lustre/a.sqsh are here"
    under_way(node.cache, wanted, 2, 10)
    assert outlook.hopeless()
    assert outlook.told() == ("200 B of 1000 B of /lustre/a.sqsh are here, the rest takes 40s more")


def test_the_wait_ends_at_the_deadline_whatever_the_pauses(
    staging_node: Node, make_image: Callable[..., Image]
) -> None:
    node = msgspec.structs.replace(staging_node, clock=Hands())
    end = Deadline.after(10, node.clock)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        node.clock.sleep(seconds)

    with pytest.raises(Declined) as caught:
        stage._wait(Eta(node, make_image(), end), pause)
    assert caught.value.reason == "deadline"
    assert node.clock.monotonic() == pytest.approx(1010)
    assert pauses[0] == stage.FIRST_PAUSE
    assert max(pauses) <= stage.LONGEST_PAUSE


def test_a_copy_that_is_resumed_is_not_judged_by_the_one_that_was_killed(
    cache: Cache, looked: OpenImage, staging_node: Node, asking: Job, monkeypatch: Patch
) -> None:
    """`started` is said before the claim: the hook sees half of it done in the last hour."""
    node = staging_node
    killed_one = pipeline.claim(Task(node, asking, looked))
    began = node.clock.monotonic() - 3600
    part = cache.part(looked.image.key)
    part.write_owner(msgspec.structs.replace(killed_one, phase="copying", began=began))
    part.image.write_bytes(CONTENT)
    part.map.write_bytes(b"\1" * 16 + bytes(32))
    claim = pipeline.claim

    def slow(task: Task) -> Owner:
        node.clock.sleep(0.3)
        return claim(task)

    monkeypatch.setattr(pipeline, "claim", slow)
    staged = stage.stage(node, asking, looked, Deadline.after(3600, node.clock))
    assert staged.result == "copied"


@pytest.fixture
def signalled(monkeypatch: Patch) -> list[tuple[int, int]]:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def lease(node: Node, job: int, key: str) -> None:
    node.leases.write(Lease(job, User("", 0, 0), 0.0, "/cache", (Use(key),)))


@pytest.mark.usefixtures("living")
@pytest.mark.parametrize(
    ("others", "alive", "stopped"),
    [
        pytest.param([], True, True, id="nobody else wants it"),
        pytest.param([(8, "other")], True, True, id="others want something else"),
        pytest.param([(8, "same")], True, False, id="another job waits for it"),
        pytest.param([], False, False, id="ended: the pid may be anybody's by now"),
    ],
)
def test_an_aborted_copy_is_stopped_only_if_nobody_else_waits_for_it(
    staging_node: Node,
    asking: Job,
    make_image: Callable[..., Image],
    signalled: list[tuple[int, int]],
    others: list[tuple[int, str]],
    alive: bool,
    stopped: bool,
) -> None:
    wanted = make_image(size=SIZE)
    under_way(staging_node.cache, wanted, 1, 10, pid=4242)
    lease(staging_node, asking.id, wanted.key)
    for job, key in others:
        lease(staging_node, job, wanted.key if key == "same" else key)
    with contextlib.ExitStack() as held:
        if alive:
            held.enter_context(lock.held(staging_node.cache.key_lock(wanted.key), 0))
        stage.abort(staging_node.cache, staging_node.leases, asking.id, wanted.key)
    assert signalled == ([(4242, signal.SIGTERM)] if stopped else [])


def test_an_aborted_copy_that_has_ended_or_not_begun_is_no_error(
    staging_node: Node, asking: Job, make_image: Callable[..., Image], monkeypatch: Patch
) -> None:
    def gone(*_: object) -> None:
        raise ProcessLookupError

    wanted = make_image(size=SIZE)
    with lock.held(staging_node.cache.key_lock(wanted.key), 0):
        stage.abort(staging_node.cache, staging_node.leases, asking.id, wanted.key)
        under_way(staging_node.cache, wanted, 1, 10)
        monkeypatch.setattr(os, "kill", gone)
        stage.abort(staging_node.cache, staging_node.leases, asking.id, wanted.key)


def test_no_innocent_process_is_stopped(
    staging_node: Node,
    asking: Job,
    make_image: Callable[..., Image],
    signalled: list[tuple[int, int]],
) -> None:
    """The lock's new holder has not claimed the part yet; the pid in it is a dead stager's."""
    wanted = make_image(size=SIZE)
    under_way(staging_node.cache, wanted, 1, 10, boot="another")
    with lock.held(staging_node.cache.key_lock(wanted.key), 0):
        stage.abort(staging_node.cache, staging_node.leases, asking.id, wanted.key)
    assert signalled == []


@pytest.mark.usefixtures("living")
def test_who_waits_is_told_how_far_how_fast_and_how_long_still(
    staging_node: Node, make_image: Callable[..., Image]
) -> None:
    node = msgspec.structs.replace(staging_node, clock=Hands())
    wanted = make_image(size=SIZE)
    heard: list[str] = []

    def watch(outlook: Eta) -> None:
        heard.append(outlook.progress())

    outlook = Eta(node, wanted, Deadline.after(99, node.clock), watch)
    assert not outlook.hopeless()
    under_way(node.cache, wanted, 2, 10)
    assert not outlook.hopeless()
    assert not outlook.hopeless()
    assert heard == ["the copy of /lustre/a.sqsh to this node is about to begin"] * 2 + [
        "copying /lustre/a.sqsh to this node: 20%, 20 B/s, 40s left"
    ]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_stager_is_heard_to_have_left_the_hooks_session_before_the_hook_goes_on(
    staging: Staging, staging_node: Node, monkeypatch: Patch, seconds: float
) -> None:
    """Slurm kills the hook's process group at its end, also of one that may not wait."""
    from forestage.stage import stager

    patient: list[float] = []
    hear = stager.hear

    def noting(line: object, timeout: float) -> object:
        patient.append(timeout)
        return hear(line, timeout)  # type: ignore[arg-type]

    monkeypatch.setattr(stager, "hear", noting)
    with contextlib.suppress(Declined):
        staging(seconds)
    assert patient[0] >= stage.HANDSHAKE
