"""Waiting for a copy: one for all who want it, and no job waits in vain or for ever."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.cache.part import PartRecord, boot_id
from forestage.cache.source_image import SourceImage
from forestage.clock import Clock, Deadline
from forestage.errors import Declined, Failed
from forestage.slurm.job import Job
from forestage.sources.source import OpenImage
from forestage.stage import copy_queue, copy_wait, pipeline, stager
from forestage.stage.copy_wait import OBSERVE, SPEEDUP_MARGIN, TRIES, Arrival, CopyEstimate
from forestage.stage.task import CopyTask
from forestage.system import lock
from forestage.system.as_user import User
from forestage.system.daemon import StartChannel, StartReport

Make = Callable[..., SourceImage]

CHUNK = 1 << 16
CONTENT = b"container " * (CHUNK // 4)
Patch = pytest.MonkeyPatch
Obtain = Callable[..., Arrival]


@pytest.fixture
def opened(shared: Path, look: Callable[[Path], OpenImage]) -> Iterator[OpenImage]:
    (shared / "image.sqsh").write_bytes(CONTENT)
    found = look(shared / "image.sqsh")
    yield found
    found.close()


@pytest.fixture
def obtain(staging_node: Node, asking: Job, opened: OpenImage) -> Obtain:
    def obtaining(seconds: float = 3600.0, **config: object) -> Arrival:
        node = staging_node.with_config(**config)
        return obtained(node, asking, opened, Deadline.after(seconds, node.clock))

    return obtaining


def obtained(node: Node, job: Job, opened: OpenImage, deadline: Deadline) -> Arrival:
    with copy_wait.ensure_copy_started(node, job, opened) as copying:
        return copy_wait.wait_for_copy(node, job, opened, copying, deadline)


class Copies:
    """Counts the copies that begin, in whatever process, and does something to them.

    A file is what all processes see.
    """

    def __init__(self, counter: Path) -> None:
        self.counter = counter
        self.run = pipeline.run_copy
        self.deed: Callable[[], None] = lambda: None
        counter.touch()

    def begins(self, *arguments: object) -> None:
        with self.counter.open("ab") as file:
            file.write(b"x")
        self.deed()
        self.run(*arguments)  # type: ignore[arg-type]

    @property
    def count(self) -> int:
        return self.counter.stat().st_size

    def raise_error(self, error: BaseException) -> None:
        def fail() -> None:
            raise error

        self.deed = fail


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: Patch) -> Copies:
    made = Copies(tmp_path / "copies")
    monkeypatch.setattr(pipeline, "run_copy", made.begins)
    return made


def test_wait_for_an_entry_in_the_cache_is_a_hit_without_fork_or_wait(
    obtain: Obtain, opened: OpenImage, publish: Callable[[SourceImage], Entry], monkeypatch: Patch
) -> None:
    publish(opened.image)
    monkeypatch.setattr(os, "fork", None)
    assert obtain(seconds=0) == "hit"


def test_hook_joins_the_copy_that_another_hook_started(
    cache: Cache,
    opened: OpenImage,
    staging_node: Node,
    obtain: Obtain,
    copies: Copies,
    publish: Callable[[SourceImage], Entry],
    monkeypatch: Patch,
) -> None:
    held = lock.held(cache.key_lock(opened.image.key), 0)
    pauses: list[float] = []

    def publish_and_release(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            publish(opened.image)
            held.__exit__(None, None, None)

    monkeypatch.setattr(staging_node.clock, "sleep", publish_and_release)
    with held:
        assert obtain() == "joined"
    assert (len(pauses), copies.count) == (3, 0)


def test_entry_published_since_the_hook_searched_the_cache_is_joined(
    obtain: Obtain, copies: Copies, monkeypatch: Patch
) -> None:
    obtain()
    find = Cache.find_entry
    first = iter([None])
    here = os.getpid()

    def late(cache: Cache, wanted: SourceImage) -> Entry | None:
        found = find(cache, wanted)
        return next(first, found) if os.getpid() == here else found

    monkeypatch.setattr(Cache, "find_entry", late)
    assert obtain() == "joined"
    assert copies.count == 1


def test_hook_waits_for_a_copy_until_the_deadline_and_is_declined(
    cache: Cache, opened: OpenImage, obtain: Obtain
) -> None:
    with lock.held(cache.key_lock(opened.image.key), 0), pytest.raises(Declined) as caught:
        obtain(seconds=0.05)
    assert (caught.value.reason, isinstance(caught.value, Failed)) == ("deadline", False)


def test_killed_stager_with_a_late_freed_lock_counts_as_one_failed_try(
    opened: OpenImage, obtain: Obtain, publish: Callable[[SourceImage], Entry], monkeypatch: Patch
) -> None:
    """The kernel closes its socket first: the next stager may find the key still taken, and go."""
    told: list[list[StartReport]] = [[], [StartReport("busy")]] * (TRIES - 1)

    class Ended(StartChannel):
        def __init__(self, messages: list[StartReport]) -> None:
            self.messages = list(messages)

        def close(self) -> None: ...

        def receive_message(self, timeout: float, flags: int = 0) -> StartReport | None:
            return self.messages.pop(0) if self.messages else StartReport("died")

    def start(task: CopyTask) -> StartChannel:
        if told:
            return Ended(told.pop(0))
        publish(task.image)
        return Ended([StartReport("published")])

    monkeypatch.setattr(stager, "start_stager", start)
    assert obtain() == "copied"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_bug_in_the_stager_fails_the_hook_and_publishes_no_entry(
    cache: Cache, obtain: Obtain, copies: Copies, error: BaseException
) -> None:
    copies.raise_error(error)
    with pytest.raises(Failed) as caught:
        obtain()
    assert caught.value.reason == "copy"
    assert not list(cache.entries.iterdir())


@pytest.mark.parametrize("error", [Failed("copy", "rsync: exit 23"), Declined("changed", "moved")])
def test_error_of_the_stager_is_raised_in_the_hook(
    obtain: Obtain, copies: Copies, error: Declined
) -> None:
    copies.raise_error(error)
    with pytest.raises(Declined) as caught:
        obtain()
    assert type(caught.value) is type(error)
    assert (caught.value.reason, str(caught.value)) == (error.reason, str(error))


class ManualClock(Clock):
    """A clock that goes where a test puts it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def under_way(
    cache: Cache, wanted: SourceImage, there: int, chunks: int, **changes: object
) -> None:
    """A part of which so many of its chunks are in."""
    part = cache.part(wanted.key)
    owner = PartRecord(
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
    part.write_record(msgspec.structs.replace(owner, **changes))
    part.map.write_bytes(b"\1" * 16 * there + bytes(16) * (chunks - there))


SIZE = 1000


@pytest.mark.usefixtures("living")
@pytest.mark.parametrize(
    ("left", "changes", "mine", "hopeless"),
    [
        # The copy ahead needs ten seconds more.
        pytest.param(10.0 / SPEEDUP_MARGIN - 0.1, {}, {}, True, id="copy ends too late"),
        pytest.param(10.0 / SPEEDUP_MARGIN + 0.1, {}, {}, False, id="copy may end in time"),
        pytest.param(1.0, {"began": 1000 - OBSERVE + 0.01}, {}, False, id="too early to estimate"),
        pytest.param(1.0, {"placed": False, "phase": "queued"}, {}, False, id="a slot is free"),
        pytest.param(1.0, {}, {"placed": True}, False, id="job has its slot"),
        pytest.param(1.0, {"boot": "older"}, {}, False, id="no copy is ahead"),
    ],
)
def test_job_does_not_wait_for_a_queued_copy_that_would_start_too_late(
    staging_node: Node,
    make_image: Make,
    monkeypatch: Patch,
    left: float,
    changes: dict[str, object],
    mine: dict[str, object],
    hopeless: bool,
) -> None:
    node = msgspec.structs.replace(staging_node.with_config(max_copies=1), clock=ManualClock())
    ahead, wanted = make_image(inode=5, size=SIZE), make_image(size=SIZE)
    under_way(node.cache, ahead, 5, 10, **{"placed": True, **changes})
    under_way(node.cache, wanted, 0, 10, **{"since": 990.0, "phase": "queued", **mine})
    monkeypatch.setattr(copy_queue, "STALLED_AFTER", 1e9)
    monkeypatch.setattr(lock, "is_free", lambda _: False)
    needed = Lease(8, User("", 1, 1), 0.0, "", (EntryUse(ahead.key), EntryUse(wanted.key)))
    node.leases.write_lease(needed)
    eta = CopyEstimate(node, wanted, Deadline.after(left, node.clock))
    assert eta.should_stop_waiting() is hopeless
    assert ("is queued behind other copies for 10s more" in eta.format_summary()) is (
        eta.seconds_until_slot > 0
    )
    assert node.cache.part(wanted.key).is_waited_for(node.clock.wall())


@pytest.fixture
def living(monkeypatch: Patch) -> None:
    """The stagers that these tests make up are taken for processes that run."""
    monkeypatch.setattr(Cache, "find_stager", lambda cache, key: cache.part(key).find_record())


@pytest.mark.usefixtures("living")
@pytest.mark.parametrize(
    ("there", "changes", "left", "hopeless"),
    [
        # Ten chunks; in 10 s five came, so the rest takes 10 s.
        pytest.param(5, {}, 10.0, False, id="just in time"),
        pytest.param(5, {}, 9.0, False, id="a tenth too late"),
        pytest.param(5, {}, 10.0 / SPEEDUP_MARGIN + 0.1, False, id="in time if a little faster"),
        pytest.param(5, {}, 10.0 / SPEEDUP_MARGIN - 0.1, True, id="late even if a little faster"),
        pytest.param(1, {}, 60.0, True, id="far too slow"),
        pytest.param(1, {}, 90.0, False, id="slow, but there is time"),
        pytest.param(10, {}, 0.1, False, id="all there, not yet published"),
        pytest.param(0, {}, 1.0, False, id="nothing copied yet, no rate"),
        # What was there before this copy began says nothing about its rate.
        pytest.param(5, {"resumed": 400}, 10.0, True, id="resumed"),
        pytest.param(5, {"resumed": 500}, 1.0, False, id="resumed, nothing new yet"),
        pytest.param(1, {"resumed": 60}, 1.0, False, id="less than a chunk, no rate"),
        pytest.param(1, {"began": 1000 - OBSERVE + 0.01}, 1.0, False, id="too early to estimate"),
        pytest.param(1, {"began": 1000 - OBSERVE}, 1.0, True, id="late enough to estimate"),
        pytest.param(1, {"phase": "queued", "began": 0.0}, 1.0, False, id="queued"),
        pytest.param(10, {}, 0.0, True, id="no time left"),
        pytest.param(1, {"phase": "queued"}, 0.0, True, id="queued, no time left"),
    ],
)
def test_job_stops_waiting_for_a_copy_that_would_miss_the_deadline(
    staging_node: Node,
    make_image: Make,
    there: int,
    changes: dict[str, object],
    left: float,
    hopeless: bool,
) -> None:
    node = msgspec.structs.replace(staging_node, clock=ManualClock())
    wanted = make_image(size=SIZE)
    under_way(node.cache, wanted, there, 10, **changes)
    assert (
        CopyEstimate(node, wanted, Deadline.after(left, node.clock)).should_stop_waiting()
        is hopeless
    )


@pytest.mark.usefixtures("living")
@pytest.mark.parametrize(
    ("leased", "left", "hopeless"), [(True, 1.0, False), (True, 0.0, True), (False, 1.0, True)]
)
def test_job_waits_though_an_expected_copy_that_yields_to_its_lease_is_slow(
    staging_node: Node, make_image: Make, leased: bool, left: float, hopeless: bool
) -> None:
    node = msgspec.structs.replace(staging_node, clock=ManualClock())
    wanted = make_image(size=SIZE)
    under_way(node.cache, wanted, 1, 10, expected=500.0)
    eta = CopyEstimate(node, wanted, Deadline.after(left, node.clock), leased=leased)
    assert eta.should_stop_waiting() is hopeless


@pytest.mark.parametrize(("left", "hopeless"), [(0.01, False), (0.0, True)])
def test_job_waits_until_the_deadline_for_a_copy_that_has_not_begun(
    staging_node: Node, make_image: Make, left: float, hopeless: bool
) -> None:
    node = msgspec.structs.replace(staging_node, clock=ManualClock())
    eta = CopyEstimate(node, make_image(), Deadline.after(left, node.clock))
    assert eta.should_stop_waiting() is hopeless


@pytest.mark.usefixtures("living")
def test_summary_of_a_copy_has_the_bytes_copied_and_the_time_left(
    staging_node: Node, make_image: Make
) -> None:
    node = msgspec.structs.replace(staging_node, clock=ManualClock())
    wanted = make_image(size=SIZE)
    eta = CopyEstimate(node, wanted, Deadline.after(1, node.clock))
    assert eta.format_summary() == "0 B of 1000 B of /lustre/a.sqsh are here"
    under_way(node.cache, wanted, 2, 10)
    assert eta.should_stop_waiting()
    assert eta.format_summary() == (
        "200 B of 1000 B of /lustre/a.sqsh are here, the rest takes 40s more"
    )


def test_wait_for_a_copy_ends_exactly_at_the_deadline_with_bounded_pauses(
    staging_node: Node, asking: Job, opened: OpenImage, monkeypatch: Patch
) -> None:
    clock = ManualClock()
    pauses: list[float] = []
    sleep = clock.sleep

    def noting(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(clock, "sleep", noting)
    node = msgspec.structs.replace(staging_node, clock=clock)
    with lock.held(node.cache.key_lock(opened.image.key), 0), pytest.raises(Declined) as caught:
        obtained(node, asking, opened, Deadline.after(10, clock))
    assert caught.value.reason == "deadline"
    assert clock.monotonic() == pytest.approx(1010)
    assert max(pauses) <= copy_wait.LONGEST_PAUSE


def test_resumed_copy_is_not_estimated_by_the_rate_of_the_killed_copy(
    cache: Cache, opened: OpenImage, staging_node: Node, asking: Job, copies: Copies
) -> None:
    """`started` is said before the claim: the hook sees half of it done in the last hour."""
    node = staging_node
    killed_one = pipeline.claim_part(CopyTask(node, asking, opened))
    began = node.clock.monotonic() - 3600
    part = cache.part(opened.image.key)
    part.write_record(msgspec.structs.replace(killed_one, phase="copying", began=began))
    part.image.write_bytes(CONTENT)
    part.map.write_bytes(b"\1" * 16 + bytes(32))
    copies.deed = lambda: node.clock.sleep(0.3)
    assert obtained(node, asking, opened, Deadline.after(3600, node.clock)) == "copied"


@pytest.mark.usefixtures("living")
def test_wait_progress_message_has_the_percentage_and_the_time_left(
    staging_node: Node, make_image: Make
) -> None:
    node = msgspec.structs.replace(staging_node, clock=ManualClock())
    wanted = make_image(size=SIZE)
    heard: list[str] = []

    def watch(line: Callable[[], str]) -> None:
        heard.append(line())

    eta = CopyEstimate(node, wanted, Deadline.after(99, node.clock), watch)
    assert not eta.should_stop_waiting()
    under_way(node.cache, wanted, 2, 10)
    assert not eta.should_stop_waiting()
    assert not eta.should_stop_waiting()
    assert heard == ["waiting for the copy of /lustre/a.sqsh, which is about to begin"] * 2 + [
        "waiting for the copy of /lustre/a.sqsh: 20% are here, about 40s left"
    ]
