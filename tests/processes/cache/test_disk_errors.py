"""A data error of the cache's disk is seen once, and stops hits until each entry was read."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage.cache import disk_errors
from forestage.cache.layout import Cache
from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.paths import NodePaths

NVME = frozenset({"nvme0n1", "dm-3"})
MEDIUM = "critical medium error, dev nvme0n1, sector 7814 op 0x0:(READ) flags 0x80700 phys_seg 4"


class At(Clock):
    def __init__(self, now: float) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("line", "is_loss"),
    [
        (MEDIUM, True),
        ("I/O error, dev nvme0n1, sector 61816 op 0x0:(READ) flags 0x0 phys_seg 1", True),
        ("protection error, dev dm-3, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1", True),
        ("blk_update_request: I/O error, dev nvme0n1, sector 61816 op 0x0:(READ)", True),
        ("critical medium error, dev nvme0c1n1, sector 8 op 0x0:(READ) flags 0x0", True),
        ("I/O error, dev nvme1n1, sector 61816 op 0x0:(READ) flags 0x0 phys_seg 1", False),
        ("I/O error, dev nvme0n12, sector 61816 op 0x0:(READ) flags 0x0 phys_seg 1", False),
        ("I/O error, dev nvme0n1, sector 0 op 0x1:(WRITE) flags 0x800 phys_seg 0", False),
        ("I/O error, dev nvme0n1, sector 0 op 0x3:(DISCARD) flags 0x800 phys_seg 1", False),
        ("critical target error, dev nvme0n1, sector 8 op 0x3:(DISCARD) flags 0x0", False),
        ("EXT4-fs (nvme0n1): mounted filesystem", False),
        # What users have the kernel log: a path of theirs, and the name of a process
        (f"overlayfs: failed to resolve '/no {MEDIUM}': -2", False),
        (f"overlayfs: failed to resolve '{MEDIUM}': -2", False),
        (f"overlayfs: failed to resolve '/x\\x0a{MEDIUM}': -2", False),
        (f" {MEDIUM}", False),
        (f"x\n{MEDIUM}", False),
        (f"blk_update_request: blk_update_request: {MEDIUM}", False),
        ("I/O error, dev [814]: segfault at 0 ip 0000 sp 0000 error 4 likely on CPU 1", False),
        ("I/O error, dev nvme0n1, sector 61816x", False),
        ("", False),
    ],
)
def test_kernel_log_line_is_a_read_error_only_if_it_is_about_the_caches_disks(
    line: str, is_loss: bool
) -> None:
    assert bool(disk_errors.list_read_errors([line], NVME)) is is_loss


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """LVM on an encrypted partition of one disk and on another disk."""
    sys = tmp_path / "sys"
    block = sys / "block"
    for made in ("dm-3/slaves", "dm-1/slaves", "nvme0n1/nvme0n1p2", "nvme1n1"):
        (block / made).mkdir(parents=True)
    (block / "nvme0n1/nvme0n1p2/partition").write_text("2\n")
    (block / "dm-3/slaves/dm-1").symlink_to(block / "dm-1")
    (block / "dm-3/slaves/nvme1n1").symlink_to(block / "nvme1n1")
    (block / "dm-1/slaves/nvme0n1p2").symlink_to(block / "nvme0n1/nvme0n1p2")
    (sys / "dev/block").mkdir(parents=True)
    return sys


def test_list_devices_lists_all_disks_below_lvm_and_encryption(
    sys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sys / "dev/block/8:1").symlink_to(sys / "block/dm-3")
    monkeypatch.setattr("os.major", lambda device: 8)
    monkeypatch.setattr("os.minor", lambda device: 1)
    assert disk_errors.list_devices(tmp_path, sys) == {"dm-3", "dm-1", "nvme0n1", "nvme1n1"}


def test_list_devices_is_empty_for_a_cache_without_a_disk() -> None:
    assert disk_errors.list_devices(Path("/proc")) == frozenset()


class Log:
    """Plays the kernel's log."""

    def __init__(self, places: NodePaths, cache: Cache) -> None:
        self.places, self.cache = places, cache
        self.lines: list[tuple[int, str]] = []

    def __call__(self, deadline: Deadline) -> Iterator[tuple[int, str]]:
        return iter(self.lines)

    def tells(self, text: str) -> None:
        self.lines.append((len(self.lines) + 100, text))

    def look(self, now: float = 1000.0) -> disk_errors.DiskErrorState:
        disk_errors.scan_kernel_log(self.places, self.cache, At(now))
        return disk_errors.read_state(self.places)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log(NodePaths(tmp_path), Cache(tmp_path))
    monkeypatch.setattr(disk_errors, "_read_kernel_log", log)
    monkeypatch.setattr(disk_errors, "list_devices", lambda root: NVME)
    return log


def test_kernel_read_error_starts_a_disk_doubt_once_but_not_if_older_than_the_first_scan(
    log: Log,
) -> None:
    log.tells(MEDIUM)  # what was before is of earlier entries
    assert log.look().since == 0
    disk_errors.check_no_doubt(log.places)
    log.tells("something else")
    assert log.look().since == 0
    log.tells(MEDIUM)
    assert log.look(2000.0).since == 2000.0
    with pytest.raises(Declined, match="nvme0n1, sector 7814") as declined:
        disk_errors.check_no_doubt(log.places)
    assert declined.value.reason == "disk-errors"
    assert log.look(3000.0).since == 2000.0
    assert disk_errors.end_doubt(log.places, 2000.0)
    disk_errors.check_no_doubt(log.places)
    assert log.look(4000.0).since == 0


def test_disk_doubt_is_not_ended_if_another_read_error_came_since(log: Log) -> None:
    log.look()
    for now in (2000.0, 3000.0):
        log.tells(MEDIUM)
        log.look(now)
    assert not disk_errors.end_doubt(log.places, 2000.0)
    assert disk_errors.read_state(log.places).since == 3000.0


def test_unreadable_kernel_log_starts_no_disk_doubt(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(deadline: Deadline) -> None:
        raise PermissionError

    monkeypatch.setattr(disk_errors, "_read_kernel_log", refused)
    assert log.look() == disk_errors.DiskErrorState()


@pytest.mark.parametrize("damage", ["{", "[]", '{"since": "today"}'])
def test_damaged_disk_error_record_is_no_doubt_and_is_replaced(log: Log, damage: str) -> None:
    log.places.run.mkdir(parents=True)
    log.places.disk_errors.write_text(damage)
    disk_errors.check_no_doubt(log.places)
    log.tells("begin")
    assert log.look().seen == 101


def test_kernel_log_of_this_machine_is_read_in_ascending_record_numbers() -> None:
    numbers = [number for number, _ in disk_errors._read_kernel_log(Deadline.after(60, Clock()))]
    assert numbers == sorted(set(numbers))
    assert numbers


class KernelLog:
    """Plays /dev/kmsg, by a read(2) that gives one record after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, records: Iterator[bytes]) -> None:
        self.records, self.reads = records, 0
        monkeypatch.setattr(disk_errors, "KERNEL_LOG", Path("/dev/null"))
        monkeypatch.setattr(disk_errors, "list_devices", lambda root: NVME)
        monkeypatch.setattr(os, "read", self.read)

    def read(self, fd: int, length: int) -> bytes:
        self.reads += 1
        return next(self.records, b"")


def test_kernel_log_record_written_by_a_program_starts_no_disk_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, cache = NodePaths(tmp_path), Cache(tmp_path)
    heads = ("6,1,5,-;begin", f"11,2,5,-;{MEDIUM}", f"3,3,5,-;{MEDIUM}")  # 11 is LOG_USER | LOG_ERR
    since = []
    for count in (1, 2, 3):
        with monkeypatch.context() as patched:
            KernelLog(patched, (head.encode() for head in heads[:count]))
            disk_errors.scan_kernel_log(places, cache, At(2000.0))
        since.append(disk_errors.read_state(places).since)
    assert since == [0, 0, 2000.0]


class Ticking(At):
    """A clock on which each look at it takes a hundredth of the time for a look at the log."""

    def __init__(self) -> None:
        super().__init__(2000.0)
        self.ticks = 0

    def monotonic(self) -> float:
        self.ticks += 1
        return self.ticks * disk_errors.LOOK_TIME / 100


@pytest.mark.parametrize(
    "flood",
    [
        lambda number: f"6,{number},5,-;overlayfs: xino=on".encode(),
        lambda number: f"6,{number},5,-;".encode(),
    ],
)
def test_kernel_log_scan_ends_while_the_log_is_filled_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flood: Callable[[int], bytes]
) -> None:
    places, cache = NodePaths(tmp_path), Cache(tmp_path)
    disk_errors._change_state(places, lambda disk: disk_errors.DiskErrorState(seen=0))
    with monkeypatch.context() as patched:
        log = KernelLog(patched, map(flood, itertools.count()))
        disk_errors.scan_kernel_log(places, cache, Ticking())
    assert log.reads < 101
    known = disk_errors.read_state(places)
    assert (known.since, known.seen) == (0, log.reads)  # no error, and the next look goes on


def test_kernel_log_scan_ends_while_the_records_are_overwritten_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwritten(fd: int, length: int) -> bytes:
        raise BrokenPipeError

    places, cache = NodePaths(tmp_path), Cache(tmp_path)
    with monkeypatch.context() as patched:
        KernelLog(patched, iter(()))
        patched.setattr(os, "read", overwritten)
        disk_errors.scan_kernel_log(places, cache, Ticking())  # returns
    assert disk_errors.read_state(places) == disk_errors.DiskErrorState()


@pytest.mark.parametrize(
    ("count", "seen"),
    [(9, 5), (2, 2)],  # the second one counts anew, as after a boot that left /run as it was
)
def test_kernel_log_longer_than_one_scan_has_no_record_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, seen: int
) -> None:
    places, cache = NodePaths(tmp_path), Cache(tmp_path)
    disk_errors._change_state(places, lambda disk: disk_errors.DiskErrorState(seen=5))
    monkeypatch.setattr(disk_errors, "MOST_RECORDS", 3)
    with monkeypatch.context() as patched:
        KernelLog(patched, (f"3,{number},5,-;{MEDIUM}".encode() for number in range(count)))
        disk_errors.scan_kernel_log(places, cache, At(2000.0))
    assert disk_errors.read_state(places) == disk_errors.DiskErrorState(seen=seen)


def test_disk_doubt_deletes_the_recorded_answers_of_running_jobs(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    places.leases.mkdir(parents=True)
    for name in ("7.shown", "7.json"):
        (places.leases / name).touch()
    disk_errors.start_doubt(places, At(5.0), "test")
    assert [one.name for one in places.leases.iterdir()] == ["7.json"]
