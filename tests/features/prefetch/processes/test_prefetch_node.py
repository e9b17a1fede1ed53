"""A node's passes: what a host says is a wish, and whatever it says, little is copied, in vain."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import NOW, Site
from forestage.cache.lease import EntryUse, LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.part import PartRecord, boot_id
from forestage.clock import Clock
from forestage.commands.command_context import CommandContext
from forestage.errors import PeerError
from forestage.events import CopyOutcome, read_events, record_outcomes
from forestage.features.peers import activation
from forestage.features.prefetch import expected_list, prefetch_node, prefetch_record, service
from forestage.features.prefetch.expected_list import LIST_LASTS, ExpectedImageList
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.features.prefetch.prefetch_node import PrefetchNodePass
from forestage.features.prefetch.prefetch_record import FORGET_AFTER, MAX_TRIES
from forestage.features.prepare import stage_images
from forestage.features.prepare.job_images import ImageResult
from forestage.features.prepare.stage_images import StageReport
from forestage.slurm.job import Job
from forestage.slurm.slurm_client import SlurmClient
from forestage.stage import copy_queue
from forestage.system import lock
from node import HANGS, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a stager is root's")

NOBODY, DAEMON = 65534, 1
MIB = 1 << 20
Patch = pytest.MonkeyPatch


class Moved(Clock):
    """A wall clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = NOW

    def wall(self) -> float:
        return self.at


class Passes:
    """n1, and what its prefetch host says: a list, or why there is none."""

    def __init__(self, root: Path) -> None:
        self.site = Site(root)
        self.clock = Moved()
        self.site.world = CommandContext(self.site.places, self.clock)
        self.configure()
        self.told: ExpectedImageList | Exception = PeerError("nobody answers")
        self.slurm = SlurmClient("", proc=root / "proc", node="n1")
        self.sequence = 0

    def configure(self, text: str = "", bandwidth: str = "1GiB") -> None:
        ours = f"prefetch: {{host: ctl1, bandwidth: {bandwidth}}}\n"
        self.site.configure(f"sources: [{self.site.lustre}]\nredirect: spank\n{ours}{text}")

    def image(self, name: str, size: int = 8192, mode: int = 0o644) -> str:
        """One that nobody has written to lately."""
        path = self.site.image(name, os.urandom(size))
        path.chmod(mode)
        os.utime(path, (NOW - 3600, NOW - 3600))
        return str(path)

    def tell(self, *images: str, user: int = NOBODY, starts: float = 1.0) -> None:
        rows = tuple(ExpectedStarts("gpu", image, user, starts) for image in images)
        self.sequence += 1
        self.told = ExpectedImageList(
            self.sequence, self.clock.at, self.clock.at + LIST_LASTS, {"gpu": "n[1-2]"}, rows
        )

    def run(self, dry_run: bool = False, waits: bool = True) -> PrefetchNodePass:
        """One pass; then waits until the copy that it began has ended."""
        done = prefetch_node.run_node_pass(self.site.node, self.slurm, self.ask, dry_run)
        if waits:
            until(self.is_over, "the end of the copy")
        return done

    def is_over(self) -> bool:
        """Whether each copy that was begun has told its end, and let its lock go."""
        begun = {
            one.key for one in prefetch_record.read_record(self.site.places).looks if one.begun
        }
        told = {
            one.outcome.key: one
            for one in read_events(self.site.places.events)
            if isinstance(one.outcome, CopyOutcome)
        }
        return all(
            key in told
            and told[key].time >= self.begun(key)
            and lock.is_free(self.site.node.cache.key_lock(key))
            for key in begun
        )

    def begun(self, key: str) -> float:
        return max(
            one.begun
            for one in prefetch_record.read_record(self.site.places).looks
            if one.key == key
        )

    def ask(self) -> ExpectedImageList:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    def copies(self) -> list[str]:
        found = [event.outcome for event in read_events(self.site.places.events)]
        return [
            one.image for one in found if isinstance(one, CopyOutcome) and one.result == "copied"
        ]


@pytest.fixture
def passes(open_path: Path) -> Passes:
    return Passes(open_path)


def states(done: PrefetchNodePass) -> list[str]:
    return [one.state for one in done.decisions]


def test_prefetch_copies_an_expected_image_once_and_records_since_when(passes: Passes) -> None:
    path = passes.image("a")
    passes.tell(path)
    assert states(passes.run()) == ["copying"]
    passes.clock.at += 60
    passes.tell(path)
    assert states(passes.run()) == ["here"]
    (event,) = read_events(passes.site.places.events)
    assert isinstance(event.outcome, CopyOutcome)
    assert (event.job, event.uid, event.outcome.expected) == (0, NOBODY, NOW)
    assert passes.site.json("status")["leases"] == []


def test_prefetch_works_on_a_node_without_a_peer_service(passes: Passes) -> None:
    """`prefetch.host` is a key of its own: `peers.enabled: auto` does not switch that off."""
    node = passes.site.node
    assert activation.is_automatic(node.config)
    assert not activation.is_on(node.config, node.places, time.monotonic())
    passes.tell(passes.image("a"))
    assert states(passes.run()) == ["copying"]
    (event,) = read_events(passes.site.places.events)
    assert isinstance(event.outcome, CopyOutcome)
    assert (event.outcome.result, event.outcome.from_peers) == ("copied", 0)


def test_prefetched_entry_is_unused_and_loses_its_use_time_once_no_longer_expected(
    passes: Passes,
) -> None:
    passes.tell(passes.image("a"))
    assert states(passes.run()) == ["copying"]
    (item,) = passes.site.json("ls")
    assert (item["unused"], item["used"]) == (True, item["entry"]["created"])
    passes.tell()
    passes.run()
    (item,) = passes.site.json("ls")
    assert (item["unused"], item["used"]) == (True, 0.0)


def test_prefetch_dry_run_copies_and_records_nothing(passes: Passes) -> None:
    passes.tell(passes.image("a"))
    done = passes.run(dry_run=True)
    assert states(done) == ["would be copied next"]
    assert passes.site.keys() == set()
    assert expected_list.find_list(passes.site.places) is None
    assert prefetch_record.read_record(passes.site.places) == prefetch_record.PrefetchRecord()


# --- a host that lies


def outside(passes: Passes) -> str:
    path = passes.site.places.root / "outside"
    path.write_bytes(b"secret")
    os.utime(path, (NOW - 3600, NOW - 3600))
    return str(path)


def traversal(passes: Passes) -> str:
    outside(passes)
    return f"{passes.site.lustre}/../outside"


def symlink(passes: Passes) -> str:
    link = passes.site.lustre / "link"
    link.symlink_to(outside(passes))
    return str(link)


def private(passes: Passes) -> str:
    return passes.image("private", mode=0o600)


def link_to_private(passes: Passes) -> str:
    link = passes.site.lustre / "link"
    link.symlink_to(private(passes))
    return str(link)


def fifo(passes: Passes) -> str:
    path = passes.site.lustre / "fifo"
    os.mkfifo(path, 0o666)
    return str(path)


def directory(passes: Passes) -> str:
    (passes.site.lustre / "directory").mkdir()
    return str(passes.site.lustre / "directory")


def just_written(passes: Passes) -> str:
    path = passes.image("new")
    os.utime(path, (NOW - 5, NOW - 5))
    return path


@pytest.mark.parametrize(
    "bait",
    [
        *(outside, traversal, symlink, private, link_to_private, fifo, directory, just_written),
        lambda _: "/dev/null",
        lambda _: "/proc/self/environ",
    ],
)
def test_prefetch_refuses_a_path_that_the_user_could_not_stage_and_logs_no_event(
    passes: Passes, bait: Callable[[Passes], str]
) -> None:
    passes.tell(bait(passes))
    assert states(passes.run()) == ["refused"]
    assert passes.site.node.cache.entries.is_dir()
    assert passes.site.keys() == set()
    assert list(read_events(passes.site.places.events)) == []


@pytest.mark.parametrize("size", [8192, 4 * MIB])
def test_prefetch_checks_a_replaced_image_again_before_the_copy(
    passes: Passes, monkeypatch: Patch, size: int
) -> None:
    """Somebody may be writing it, or it may be larger than what was chosen."""
    passes.configure("max_size: 6MiB\nmin_free: 0\nlow_watermark: 100%\n")
    path = passes.image("a")
    passes.tell(path)
    with monkeypatch.context() as patch:
        patch.setattr(prefetch_node._NodePassRun, "start_best_copy", lambda _: None)
        passes.run()
    passes.image("a", size)  # half of the room is one user's
    if size == 8192:
        os.utime(path, (NOW - 10, NOW - 10))
    done = passes.run()
    assert passes.copies() == []
    assert states(done) == ["refused" if size == 8192 else "not expected enough, or no room"]


def test_prefetch_refuses_an_image_for_a_user_unknown_to_the_node(passes: Passes) -> None:
    passes.tell(passes.image("a"), user=4_000_000_000)
    (one,) = passes.run().decisions
    assert (one.state, "is no user of this node" in one.why) == ("refused", True)
    assert passes.site.keys() == set()


def test_prefetch_list_with_root_as_user_is_rejected(passes: Passes) -> None:
    passes.tell(passes.image("private", mode=0o600), user=0)
    done = passes.run()
    assert "no user" in done.silent
    assert done.decisions == ()
    assert not service.locate_list(passes.site.places).exists()


def test_prefetch_list_with_extreme_numbers_is_processed_and_replaceable(passes: Passes) -> None:
    path = passes.image("a")
    junk = {"gpu": "n[1-2]", "x": "n[1-999999999]", "y": "n[9-1", "z": ""}
    rows = [ExpectedStarts(part, path, NOBODY, 1e308) for part in ("gpu", "gpu", "x", "y", "none")]
    rows += [ExpectedStarts("gpu", passes.image("b"), DAEMON, -1e308)]
    passes.told = ExpectedImageList((1 << 63) - 1, NOW, 1e300, junk, tuple(rows))
    done = passes.run()
    assert msgspec.json.encode(done)
    assert list(prefetch_node.format_output(done))
    assert passes.copies() == [path]
    passes.clock.at += LIST_LASTS
    passes.tell(passes.image("c"))
    assert "copying" in states(passes.run()), "a list with a sequence without end ends as any"


# --- plans that flap


def two_by_turns(passes: Passes, count: int, every: float) -> None:
    """One image is named and then the other, where there is room for one beside a job's."""
    passes.configure("max_size: 4MiB\nmin_free: 0\nlow_watermark: 100%\n")
    used = passes.site.publish(passes.site.image("used", os.urandom(2 * MIB)))
    passes.site.lease(7, EntryUse(used))
    turns = passes.image("a", MIB), passes.image("b", MIB)
    for number in range(count):
        passes.tell(turns[number % 2], user=(NOBODY, DAEMON)[number % 2])
        passes.run()
        passes.clock.at += every
    assert {used} <= passes.site.keys()


def test_images_listed_alternately_are_prefetched_three_times_each_at_most(passes: Passes) -> None:
    two_by_turns(passes, 20, 60.0)
    assert 2 < len(passes.copies()) <= 2 * MAX_TRIES


def test_images_listed_alternately_are_prefetched_again_after_an_hour(passes: Passes) -> None:
    two_by_turns(passes, 8, FORGET_AFTER)
    assert len(passes.copies()) == 8


def test_image_that_leaves_and_returns_to_the_list_is_prefetched_once(passes: Passes) -> None:
    path = passes.image("a")
    for number in range(10):
        passes.tell(*([path] if number % 2 == 0 else []))
        passes.run()
        passes.clock.at += 60
    assert passes.copies() == [path]


def test_refused_image_that_leaves_and_returns_to_the_list_is_opened_three_times_at_most(
    passes: Passes, monkeypatch: Patch
) -> None:
    opened: list[tuple[object, prefetch_record.ImageInspection, float]] = []
    real = prefetch_node.inspect_image
    monkeypatch.setattr(prefetch_node, "inspect_image", lambda *a: (opened.append(a), real(*a))[1])
    path = passes.image("private", mode=0o600)
    for number in range(50):
        passes.tell(path if number % 2 == 0 else f"/other/{number}")
        passes.run()
        passes.clock.at += 60
    assert [one[1].image for one in opened].count(path) == MAX_TRIES


@pytest.mark.parametrize("is_begun", [True, False], ids=["after it began", "at once"])
def test_prefetch_tries_a_failing_copy_three_times(
    passes: Passes, monkeypatch: Patch, is_begun: bool
) -> None:
    tried = []

    def changed(node: Node, job: Job, images: list[str], *_: object) -> StageReport:
        tried.append(images)
        found = passes.site.look(Path(images[0]))
        end = CopyOutcome("declined", image=images[0], key=found.key, reason="changed")
        if is_begun:
            record_outcomes(passes.site.places, passes.clock.at, "stager", job, [end], 0.0)
        return StageReport(
            (ImageResult(images[0], "copying" if is_begun else "declined", "changed"),)
        )

    monkeypatch.setattr(stage_images, "copy_images", changed)
    path = passes.image("a")
    for _ in range(100):
        passes.tell(path)
        passes.run()
        passes.clock.at += 60
    assert len(tried) == MAX_TRIES


def test_prefetch_retries_a_copy_stopped_for_a_job_more_than_three_times(
    passes: Passes, monkeypatch: Patch
) -> None:
    """It was in vain for no fault of the image's, however often."""

    def stopped(node: Node, job: Job, images: list[str], *_: object) -> StageReport:
        found = passes.site.look(Path(images[0]))
        end = CopyOutcome("declined", image=images[0], key=found.key, reason="stopped")
        record_outcomes(passes.site.places, passes.clock.at, "stager", job, [end], 0.0)
        return StageReport((ImageResult(images[0], "copying", "deadline"),))

    path = passes.image("a")
    with monkeypatch.context() as patch:
        patch.setattr(stage_images, "copy_images", stopped)
        for _ in range(MAX_TRIES + 1):
            passes.tell(path)
            passes.run()
            passes.clock.at += 60
    passes.tell(path)
    passes.run()
    assert passes.copies() == [path]


def test_prefetch_copies_an_evicted_image_again_if_a_job_had_used_the_entry(passes: Passes) -> None:
    path = passes.image("a")
    for _ in range(MAX_TRIES + 2):
        passes.tell(path)
        assert states(passes.run()) == ["copying"]
        (key,) = passes.site.keys()
        passes.site.node.cache.record_use(key, passes.clock.at + 30)  # as the Epilog of a job does
        passes.clock.at += 60
        passes.tell(path)
        passes.run()
        passes.site.run("evict", key)


def test_prefetch_refuses_an_image_after_three_copies_that_no_job_used(passes: Passes) -> None:
    path = passes.image("a")
    for _ in range(MAX_TRIES):
        passes.tell(path)
        passes.run()
        passes.site.run("evict", "--all")
        passes.clock.at += 60
    passes.tell(path)
    (one,) = passes.run().decisions
    assert (one.state, one.why) == ("refused", "copied 3 times, and no job used it")


# --- a host that is dead, replays; clocks


def test_prefetch_uses_the_last_list_while_the_host_is_silent_until_the_list_expires(
    passes: Passes,
) -> None:
    first, second = passes.image("a"), passes.image("b", mode=0o600)
    passes.tell(first, second)
    passes.run()
    passes.told = PeerError("nobody answers")
    Path(second).chmod(0o644)
    passes.clock.at += LIST_LASTS - 1
    done = passes.run()
    assert (done.silent, done.idle) == ("nobody answers", "")
    assert passes.copies() == [first, second]
    passes.clock.at += 1
    done = passes.run()
    assert (done.silent, done.idle) == ("nobody answers", "there is no list")
    assert prefetch_record.read_record(passes.site.places).idle == "there is no list"


def test_prefetch_rejects_a_list_older_than_the_stored_list(passes: Passes) -> None:
    passes.tell(passes.image("a"))
    old = passes.told
    passes.tell(passes.image("b"))
    passes.run()
    passes.told = old
    assert "older than the one that is here" in passes.run().silent
    assert [Path(one).name for one in passes.copies()] == ["b"]


@pytest.mark.parametrize("jump", [-1e6, -5000.0, 5000.0, 1e6])
def test_prefetch_after_a_clock_jump_rejects_the_list_and_repeats_no_copy(
    passes: Passes, jump: float
) -> None:
    path = passes.image("a")
    passes.tell(path)
    passes.run()
    told = passes.told
    passes.clock.at += jump
    done = passes.run()
    assert done.silent
    assert done.idle == "there is no list"
    passes.tell(path)
    assert states(passes.run()) == ["here"]
    passes.clock.at -= jump
    passes.told = told
    passes.run()
    assert passes.copies() == [path]


# --- room


def test_prefetch_evicts_no_recently_used_entry_from_a_full_cache(passes: Passes) -> None:
    passes.configure("max_size: 3MiB\nmin_free: 0\nlow_watermark: 100%\n")
    used = passes.site.publish(passes.site.image("used", os.urandom(2 * MIB)), age=600.0)
    path = passes.image("a", MIB + MIB // 4)
    passes.tell(path)
    passes.run()
    assert passes.site.keys() == {used}
    passes.site.node.cache.record_use(used, NOW - 3600)
    passes.run()
    assert passes.copies() == [path]
    assert len(passes.site.keys()) == 1


def test_prefetch_evicts_an_unexpected_entry_before_an_expected_older_entry(passes: Passes) -> None:
    passes.configure("max_size: 4MiB\nmin_free: 0\nlow_watermark: 100%\n")
    site = passes.site
    expected_here = passes.image("old", MIB)
    old = site.publish(Path(expected_here), age=7200.0)
    other = site.publish(site.image("other", os.urandom(MIB)), age=3600.0)
    held = site.publish(site.image("held", os.urandom(MIB)), age=9000.0)
    site.lease(7, EntryUse(held))
    new = passes.image("new", MIB + MIB // 4)
    passes.tell(new, expected_here)
    passes.run()
    assert passes.copies() == [new]
    assert {old, held} <= site.keys()
    assert other not in {*site.keys()}


def test_job_that_requests_the_image_stops_its_prefetch_and_keeps_the_part(
    passes: Passes, monkeypatch: Patch
) -> None:
    key = begin_slowly(passes, monkeypatch)
    passes.site.lease(7, EntryUse(key))
    node = passes.site.node
    until(lambda: lock.is_free(node.cache.key_lock(key)), "the end of the copy")
    assert passes.copies() == []
    assert node.cache.part(key).find_record() is not None


@pytest.mark.parametrize(
    ("why", "text", "bandwidth"),
    [("`enabled: false`", "enabled: false\n", "1GiB"), ("a job runs on this node", "", "null")],
)
def test_prefetch_opens_and_copies_nothing_on_a_switched_off_or_busy_node(
    passes: Passes, why: str, text: str, bandwidth: str, monkeypatch: Patch
) -> None:
    held = passes.site.publish(passes.site.image("held"))
    passes.site.lease(7, EntryUse(held))
    passes.configure(text, bandwidth)
    monkeypatch.setattr(prefetch_node, "inspect_image", None)
    passes.tell(passes.image("a"))
    assert why in passes.run().idle
    assert passes.copies() == []


def test_prefetch_pass_opens_a_limited_number_of_images_and_starts_one_copy(passes: Passes) -> None:
    passes.tell(*(passes.image(f"i{number}", 4096) for number in range(40)))
    done = passes.run()
    assert states(done).count("copying") == len(passes.copies()) == 1
    assert states(done).count("not looked at") == 40 - prefetch_node.MAX_INSPECTIONS


def run_slowly(passes: Passes, monkeypatch: Patch, more: str = "", bandwidth: str = "4KiB") -> str:
    """A pass that begins a copy which would take minutes; its key."""
    text = f"{more}max_size: 8MiB\nmin_free: 0\nlow_watermark: 100%\nthreads: 1\nchunk_size: 1MiB\n"
    passes.configure(text, bandwidth)
    passes.clock.at = time.time()  # or its files would show that it stands still
    path = passes.image("ahead", 3 * MIB + MIB // 2)
    passes.tell(path)
    assert states(passes.run(waits=False)) == ["copying"]
    return passes.site.look(Path(path)).key


def begin_slowly(passes: Passes, monkeypatch: Patch) -> str:
    """A copy for pending jobs that would take minutes; its key."""
    key = run_slowly(passes, monkeypatch)

    def begun() -> bool:
        owner = passes.site.node.cache.part(key).find_record()
        return owner is not None and owner.phase == "copying"

    until(begun, "the copy to begin")
    return key


def test_prefetch_starts_no_second_copy_while_its_first_copy_runs(
    passes: Passes, monkeypatch: Patch
) -> None:
    begin_slowly(passes, monkeypatch)
    passes.tell(str(passes.site.lustre / "ahead"), passes.image("b"))
    assert sorted(states(passes.run(waits=False))) == ["copying", "not expected enough, or no room"]


def test_prefetch_copy_stops_if_the_leases_cannot_be_read(
    passes: Passes, monkeypatch: Patch
) -> None:
    """One of them may be on its image; nobody would look again."""

    def fail(leases: LeaseDirectory) -> frozenset[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(LeaseDirectory, "leased_keys", fail)
    stop = threading.Event()
    with copy_queue.stop_when_requested(passes.site.node, "0" * 32, stop):
        assert stop.wait(HANGS)


@pytest.mark.parametrize("begins", ["beside the copy", "just before it"])
def test_prolog_stops_a_prefetch_copy_without_a_bandwidth_limit(
    passes: Passes, monkeypatch: Patch, begins: str
) -> None:
    """Whatever it names; also if the pass saw a node without jobs a moment ago."""
    called, real = passes.site.places.hook_call_mark("prolog"), stage_images.copy_images

    def late(*args: Any) -> StageReport:
        called.touch()
        return real(*args)

    if begins == "just before it":
        monkeypatch.setattr(stage_images, "copy_images", late)
    run_slowly(passes, monkeypatch, "bandwidth: 4KiB\n", "null")
    if begins == "beside the copy":
        called.touch()

    def stopped() -> bool:
        found = [event.outcome for event in read_events(passes.site.places.events)]
        return any(one.reason == "stopped" for one in found if isinstance(one, CopyOutcome))

    until(stopped, "the end of the copy")


def test_requested_copy_stops_a_prefetch_copy_and_blocks_new_prefetches(
    passes: Passes, monkeypatch: Patch
) -> None:
    key = begin_slowly(passes, monkeypatch)
    node, image = passes.site.node, passes.site.look(Path(passes.image("job")))
    owner = PartRecord(1, boot_id(), image, MIB, "chunks", 7, 0.0, phase="copying", placed=True)
    with lock.held(node.cache.key_lock(image.key), 0):
        node.cache.part(image.key).write_record(owner)
        until(lambda: lock.is_free(node.cache.key_lock(key)), "the end of the copy")
        assert passes.run().idle == prefetch_node.COPYING
    assert passes.copies() == []


@pytest.mark.parametrize("leased", [True, False], ids=["a job's", "forestage stage"])
def test_requested_copy_gets_the_space_of_a_running_prefetch_copy(
    passes: Passes, monkeypatch: Patch, leased: bool
) -> None:
    key = begin_slowly(passes, monkeypatch)
    path = Path(passes.image("job", 6 * MIB))
    if leased:
        passes.site.lease(7, EntryUse(passes.site.look(path).key))
    node, job = (
        passes.site.node,
        stage_images.make_placeholder_job(prefetch_node.read_user(NOBODY), "n1"),
    )
    (done,) = stage_images.copy_images(node, job, [str(path)], 240.0, lambda _: None).images
    assert (done.result, done.reason) == ("copied", "")
    assert passes.copies() == [str(path)]
    until(lambda: lock.is_free(node.cache.key_lock(key)), "the end of the other copy")
