"""A real copy and a real keeper: what a job reads through while its image is on its way."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault import Gate, Points, kill_stager, source_bytes

from forestage.cache.arrival_map import NOW
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.part import PartRecord, boot_id
from forestage.errors import Declined
from forestage.stage import stager
from forestage.system import lock
from forestage.system.daemon import StartChannel
from forestage.views.through import keeper_process, read_policy
from forestage.views.through.read_policy import RUN
from node import ALICE, Node, until
from through import MIB, Copy, Shown, Through, opened, read_fresh, reading, shows, task


def start(through: Through, **keys: object) -> StartChannel:
    """Starts a stager as a hook does."""
    return stager.start_stager(task(through.node, through.opened, **keys))


def end(channel: StartChannel) -> str:
    message = channel.receive_message(120)
    assert message is not None
    return message.state


@pytest.mark.parametrize("keys", [{}, {"bandwidth": 4 * MIB}])
def test_read_through_bytes_are_right_before_during_and_after_the_copy(
    node: Node, shown: Shown, keys: dict[str, object]
) -> None:
    path = node.put("alice/image.sqsh", source_bytes())
    through = shown(path)
    with reading(path, source_bytes(), 4), start(through, **keys) as channel:
        assert read_fresh(path) == source_bytes()
        assert end(channel) == "published"
        assert read_fresh(path) == source_bytes()
    assert not {file.name for file in through.spot.iterdir()} & {"pieces", "wanted"}


def test_read_through_bytes_are_right_while_the_copy_is_stopped_halfway(
    node: Node, shown: Shown, points: Points, gate: Gate
) -> None:
    path = node.put("alice/image.sqsh", source_bytes())
    points.at("chunk", gate, nth=3)
    through = shown(path)
    with start(through, threads=1) as channel:
        until(lambda: points.count("chunk") == 3, "three chunks")
        assert read_fresh(path) == source_bytes()
        gate.open()
        assert end(channel) == "published"


def test_reader_that_gave_up_waiting_still_requests_its_pieces_from_the_copy(
    node: Node, shown: Shown
) -> None:
    """Else the copy would make way for it, and not come for as long as it reads."""
    path = node.put("alice/image.sqsh", source_bytes())
    through = shown(path)
    readers = Copy(through, source_bytes()).readers
    until(lambda: read_fresh(path, 0, 1) and readers.list_wanted(), "the server to see the copy")
    assert read_fresh(path) == source_bytes()
    after = range(RUN // MIB + 2, len(source_bytes()) // MIB + 1)
    assert set(after) <= set(readers.list_wanted((NOW,)))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE", "LONGEST", "BEGIN"):
        monkeypatch.setattr(read_policy, name, 200.0)


def test_sequential_reader_waits_for_a_copy_that_is_about_to_begin(
    patient: None, node: Node, shown: Shown
) -> None:
    """Else each node of a job would read the source from the image's head on."""
    path = node.put("alice/image.sqsh", source_bytes())
    node.cache.prepare(require_mount=False)
    key_lock = node.cache.key_lock(opened(path).image.key)
    with ThreadPoolExecutor(1) as pool:
        with lock.held_for_work(key_lock, 1.0):
            through = shown(path)
            read = pool.submit(read_fresh, path)
            through.turns(3)
            assert not read.done()
            copy = Copy(through, source_bytes())
            until(lambda: copy.readers.list_wanted((NOW,)), "the copy to be told")
            expected = copy.bring_marked()
        found = read.result()
    assert found[:RUN] == source_bytes()[:RUN]
    assert found[2 * RUN :] == expected[2 * RUN :]


@pytest.mark.parametrize("queued", [False, True])
def test_sequential_reader_does_not_wait_if_the_copy_is_queued_or_missing(
    patient: None, node: Node, shown: Shown, queued: bool
) -> None:
    path = node.put("alice/image.sqsh", source_bytes())
    node.cache.prepare(require_mount=False)
    image = opened(path).image
    with contextlib.ExitStack() as held:
        if queued:
            held.enter_context(lock.held_for_work(node.cache.key_lock(image.key), 1.0))
            owner = PartRecord(os.getpid(), boot_id(), image, MIB, "chunks", 7, 0.0)
            node.cache.part(image.key).write_record(owner)
        shown(path)
        assert shows(path, source_bytes())


def test_read_through_bytes_are_right_while_a_killed_stager_is_replaced(
    node: Node, shown: Shown, points: Points
) -> None:
    path = node.put("alice/image.sqsh", source_bytes())
    points.at("chunk", kill_stager, nth=4)
    through = shown(path)
    with reading(path, source_bytes(), 4):
        with start(through) as channel:
            assert end(channel) == "died"
        assert read_fresh(path) == source_bytes()
        points.calm()
        with start(through) as channel:
            assert end(channel) == "published"
        assert read_fresh(path) == source_bytes()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_process, "STAGER_PAUSE", 0.0)


def leased(node: Node, shown: Shown) -> Through:
    """Image and keeper of a job that runs, and needs the copy."""
    through = shown(node.put("alice/image.sqsh", source_bytes()))
    use = EntryUse(through.image.key)
    node.leases.write_lease(Lease(7, ALICE, 0.0, str(node.cache.root), (use,)))
    return through


@pytest.mark.cases(2)
@pytest.mark.parametrize(("point", "nth"), [("claimed", 1), ("reserved", 1), ("chunk", 4)])
def test_copy_with_a_killed_stager_is_resumed_while_a_job_reads_through(
    node: Node, shown: Shown, points: Points, point: str, nth: int, tmp_path: Path
) -> None:
    adjusted = tmp_path / "adjusted"
    points.at("checked", lambda: shutil.copy("/proc/self/oom_score_adj", adjusted))
    points.at(point, kill_stager, nth=nth)
    through = leased(node, shown)
    with start(through, threads=1) as channel:
        assert end(channel) == "died"
    assert read_fresh(through.path) == source_bytes()
    until(lambda: node.cache.find_entry(through.image), "the copy's end")
    assert read_fresh(through.path) == source_bytes()
    killed, other = (pid for name, pid in points.passed() if name == "claimed")
    assert killed != other
    assert points.count("chunk") == 8
    assert int(adjusted.read_text()) == 0  # its keeper's is the safest


def test_keeper_restarts_a_stager_that_is_always_killed_only_a_few_times(
    node: Node, shown: Shown, points: Points, hasty: None
) -> None:
    points.at("claimed", kill_stager, nth=None)
    through = leased(node, shown)
    with start(through) as channel:
        assert end(channel) == "died"
    until(lambda: points.count("claimed") == 1 + keeper_process.MOST_STAGERS, "stagers")
    through.turns(12)
    assert points.count("claimed") == 1 + keeper_process.MOST_STAGERS
    assert read_fresh(through.path) == source_bytes()


@pytest.mark.cases(2)
@pytest.mark.parametrize("why", ["no job", "no room", "upgraded", "stopped"])
def test_keeper_restarts_no_stager_without_a_job_or_room_or_after_stop_or_upgrade(
    node: Node, shown: Shown, points: Points, hasty: None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "upgraded":
        releases = iter(range(1000))
        monkeypatch.setattr(keeper_process, "_read_program_stamp", lambda: next(releases))
    through = leased(node, shown)

    def no_room() -> None:
        raise Declined("no-room", "as a test wants it")

    ends = {"no room": no_room, "stopped": lambda: os.kill(os.getpid(), signal.SIGTERM)}
    points.at("chunk", ends.get(why, kill_stager), nth=4)
    if why == "no job":
        node.leases.drop_lease(7)
    with start(through, threads=1) as channel:
        assert end(channel) == ("failed" if why in ends else "died")
    through.turns(16)
    assert read_fresh(through.path) == source_bytes()
    assert points.count("claimed") == 1
