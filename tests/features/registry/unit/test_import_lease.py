"""Who imports: leases of several workers on one store, with clocks and hosts of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.clock import Clock
from forestage.features.registry import import_lease
from forestage.features.registry.import_lease import (
    DEAD_AFTER,
    HEARTBEAT_INTERVAL,
    ImportLease,
    ImportLeaseRecord,
)
from forestage.features.registry.store import ImageStore

NAME = "ab" * 32 + "-x86_64-0123456789abcdef"


class Still(Clock):
    """A node's own clock, which only the test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path, Clock())


def elsewhere(host: str, token: str) -> ImportLeaseRecord:
    """A worker of a machine that nobody here can look into."""
    return ImportLeaseRecord(token, host, f"boot of {token}", "pid:[1]", 1, "1")


def join(store: ImageStore, me: ImportLeaseRecord, now: float) -> tuple[ImportLease, Still]:
    clock = Still(now)
    return ImportLease(store, NAME, me, clock), clock


def test_import_lease_is_acquired_by_one_worker_and_names_its_holder_to_the_second(
    store: ImageStore,
) -> None:
    a, _ = join(store, elsewhere("n1", "a"), 100)
    b, _ = join(store, elsewhere("n2", "b"), 9000)
    assert a.try_acquire()
    assert not b.try_acquire()
    assert b.holder == a.own_record


def test_import_lease_is_kept_while_its_worker_renews(store: ImageStore) -> None:
    a, at_a = join(store, elsewhere("n1", "a"), 100)
    b, at_b = join(store, elsewhere("n2", "b"), 9000)
    assert a.try_acquire()
    for _ in range(20):
        at_a.now += HEARTBEAT_INTERVAL
        at_b.now += DEAD_AFTER - 1
        assert a.send_heartbeat()
        assert not b.try_acquire()


def test_import_lease_of_another_host_with_the_same_name_is_not_taken_over_at_once(
    store: ImageStore,
) -> None:
    a, _ = join(store, elsewhere("n1", "a"), 100)
    b, _ = join(store, elsewhere("n1", "b"), 100)
    assert a.try_acquire()
    assert not b.try_acquire()


def test_import_lease_of_a_silent_worker_is_taken_over_after_a_minute_of_the_waiters_clock(
    store: ImageStore,
) -> None:
    a, _ = join(store, elsewhere("n1", "a"), 100)
    b, at_b = join(store, elsewhere("n2", "b"), 9000)
    assert a.try_acquire()
    assert not b.try_acquire()
    at_b.now += DEAD_AFTER - 1
    assert not b.try_acquire()
    at_b.now += 1
    assert b.try_acquire()


def test_import_lease_of_a_dead_worker_is_taken_over_by_one_of_eight_waiters(
    store: ImageStore,
) -> None:
    dead, _ = join(store, elsewhere("n0", "dead"), 0)
    assert dead.try_acquire()
    lookers = [join(store, elsewhere(f"n{n}", f"t{n}"), n) for n in range(1, 9)]
    assert not any(one.try_acquire() for one, _ in lookers)
    for _, clock in lookers:
        clock.now += DEAD_AFTER
    assert sum(one.try_acquire() for one, _ in lookers) == 1


def test_worker_that_lost_its_import_lease_stops_at_its_next_renewal(store: ImageStore) -> None:
    a, at_a = join(store, elsewhere("n1", "a"), 100)
    b, at_b = join(store, elsewhere("n2", "b"), 9000)
    a.try_acquire(), b.try_acquire()
    at_b.now += DEAD_AFTER
    assert b.try_acquire()
    at_a.now += HEARTBEAT_INTERVAL
    assert not a.send_heartbeat()
    assert not a.renew_if_newest()
    a.release()
    assert b.renew_if_newest(), "who stops takes nothing from who follows"


def test_worker_without_its_lease_file_does_not_own_a_new_lease_of_the_same_number(
    store: ImageStore,
) -> None:
    a, _ = join(store, elsewhere("n1", "a"), 100)
    a.try_acquire()
    for path in store.folder.glob("*.lease.*"):
        path.unlink()
    b, _ = join(store, elsewhere("n2", "b"), 100)
    assert b.try_acquire()
    assert not a.renew_if_newest()
    a.release()
    assert b.renew_if_newest()


def test_import_lease_of_a_reused_pid_is_taken_over_at_once(store: ImageStore) -> None:
    me = import_lease.make_lease_record("n1")
    a = ImportLease(
        store, NAME, ImportLeaseRecord("a", "n1", me.boot, me.pids, os.getpid(), "1"), Clock()
    )
    assert a.try_acquire()
    assert ImportLease(store, NAME, me, Clock()).try_acquire()


def test_import_lease_of_another_pid_namespace_is_not_taken_over_at_once(store: ImageStore) -> None:
    me = import_lease.make_lease_record("n1")
    a = ImportLease(
        store, NAME, ImportLeaseRecord("a", "n1", me.boot, "pid:[1]", 4_000_000, "1"), Clock()
    )
    assert a.try_acquire()
    assert not ImportLease(store, NAME, me, Clock()).try_acquire()


def test_end_of_an_import_lease_leaves_no_lease_files(store: ImageStore) -> None:
    a, _ = join(store, elsewhere("n1", "a"), 100)
    b, at_b = join(store, elsewhere("n2", "b"), 9000)
    a.try_acquire(), b.try_acquire()
    at_b.now += DEAD_AFTER
    b.try_acquire()
    b.release()
    assert {path.name for path in store.folder.iterdir()} <= {f"{NAME}.wanted"}


def test_import_failure_is_reported_only_to_workers_that_waited(store: ImageStore) -> None:
    a, _ = join(store, elsewhere("n1", "a"), 100)
    waited, _ = join(store, elsewhere("n2", "b"), 100)
    came_later, _ = join(store, elsewhere("n3", "c"), 100)
    a.try_acquire(), waited.try_acquire()
    a.release("import-failed", "enroot's words")
    told = waited.find_failure()
    assert told is not None
    assert (told.reason, told.detail) == ("import-failed", "enroot's words")
    assert came_later.find_failure() is None


@pytest.mark.parametrize("kind", ["empty", "nonsense", "fifo", "link", "directory"])
def test_invalid_lease_file_is_taken_over_after_a_minute(store: ImageStore, kind: str) -> None:
    path = store.folder / f"{NAME}.lease.1"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("" if kind == "empty" else "[" * 70_000)
    a, at_a = join(store, elsewhere("n1", "a"), 100)
    assert not a.try_acquire()
    at_a.now += DEAD_AFTER
    assert a.try_acquire()
    assert a.renew_if_newest()
