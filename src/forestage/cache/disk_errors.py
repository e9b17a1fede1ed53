"""Doubt in the cache's disk: a data error begins it, and reading every entry again ends it.

A block that cannot be read makes job after job fail, each with a hit, while the source reads fine.
A plain bind mount tells nobody, and ext4 counts only errors of its own structures. The kernel's log
shows it ("critical medium error, dev nvme0n1, sector 1234 op 0x0:(READ)"). Epilogs and the sweep
look there.

While there is doubt no job is served (`check_no_doubt`, in hooks): it reads the shared path. The
sweep reads each entry, evicts what is bad, and ends the doubt.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from forestage.cache.layout import Cache
from forestage.clock import Clock, Deadline
from forestage.errors import Declined, Failed
from forestage.paths import NodePaths
from forestage.system import folders, lock, records
from forestage.system.files import open_descriptor

KERNEL_LOG = Path("/dev/kmsg")
FACILITY = 8  # priorities from here on are of facilities other than the kernel's (syslog(2))
LONGEST = 8192  # bytes of one record of the kernel's log; a shorter buffer gets EINVAL
LOCK_TIMEOUT = 1.0  # seconds; another hook looks at the same then
LOOK_TIME = 1.0  # seconds; users can fill the kernel's log as fast as a hook reads it
MOST_RECORDS = 200_000  # as many as are read in that time; the largest logs have some 100,000

# The whole of a record, from its first byte: users have the kernel log names of their own, such as
# "overlayfs: failed to resolve '/I/O error, dev …'". What users name at a record's beginning is a
# process, in 15 bytes at most (show_signal_msg), too few for a device and a sector.
_PREFIXES = (
    "",  # block/blk-mq.c, blk_print_req_error(), since 5.16 and in EL 9's 5.14
    "blk_update_request: ",  # block/blk-core.c, print_req_error(), to 5.15
)
_ERROR = (
    rf"(?:{'|'.join(_PREFIXES)})"
    r"((?:I/O|critical medium|protection) error, dev ([^\s,]+), sector \d+ op \S+)"
    r"(?: .*)?"  # flags and more, which differ between releases
)
_LEG = r"(nvme\d+)c\d+(n\d+)"  # one path of several to an NVMe


class DiskErrorState(msgspec.Struct, frozen=True):
    """disk.json: what is known of the cache's disk.

    `seen` is the number of the kernel log's next record, -1 before the first look. `since` (seconds
    since the epoch) and `why` are the doubt; 0 and "" without one. `proved` are the keys of entries
    that were read and right since it began: by name, as a clock that steps would have any of them
    read before it, or after it.
    """

    seen: int = -1
    since: float = 0.0
    why: str = ""
    proved: tuple[str, ...] = ()


def read_state(places: NodePaths) -> DiskErrorState:
    """What was noted so far; nothing where that cannot be read."""
    try:
        return records.load(places.disk_errors, DiskErrorState)
    except (OSError, records.DamagedRecord):
        return DiskErrorState()


def check_no_doubt(places: NodePaths) -> None:
    """Raises Declined while there is doubt."""
    disk = read_state(places)
    if disk.since:
        raise Declined("disk-errors", f"the cache's disk has lost data ({disk.why})")


def start_doubt(places: NodePaths, clock: Clock, why: str) -> None:
    """Notes an error that somebody met. Raises OSError, Failed."""
    _change_state(places, lambda disk: _with_doubt(disk, clock, why))


def end_doubt(places: NodePaths, since: float) -> bool:
    """Ends the doubt, unless it began anew after `since`. Raises OSError, Failed."""

    def ended(disk: DiskErrorState) -> DiskErrorState:
        same = disk.since == since
        return msgspec.structs.replace(disk, since=0.0, why="", proved=()) if same else disk

    return _change_state(places, ended).since == since


def record_proven_entry(places: NodePaths, since: float, key: str) -> None:
    """Notes that an entry is right, unless the doubt began anew after `since`.

    Raises OSError, Failed.
    """

    def noted(disk: DiskErrorState) -> DiskErrorState:
        same = disk.since == since and key not in disk.proved
        return msgspec.structs.replace(disk, proved=(*disk.proved, key)) if same else disk

    _change_state(places, noted)


def scan_kernel_log(places: NodePaths, cache: Cache, clock: Clock) -> None:
    """Begins doubt where the kernel's log tells of data errors since the last look.

    The first look only notes where the log ends. It takes some milliseconds, LOOK_TIME at most,
    and never raises: a hook has nothing to do about a log that it may not read. What it does not
    get to is unknown and no error; the next look reads that, if the log still has it.
    """

    def looked(disk: DiskErrorState) -> DiskErrorState:
        deadline = Deadline.after(LOOK_TIME, clock)
        reading = _read_kernel_log(deadline)
        next_number, found = -1, ""
        for number, text in itertools.islice(reading, MOST_RECORDS):
            next_number = number + 1
            if number >= disk.seen:
                found = next(iter(list_read_errors((text,), names)), found)
        is_whole = deadline.seconds_left() > 0 and next(reading, None) is None
        if next_number < 0 or (next_number < disk.seen and not is_whole):
            return disk
        now = msgspec.structs.replace(disk, seen=next_number)
        return _with_doubt(now, clock, found) if found and disk.seen >= 0 else now

    with contextlib.suppress(OSError, Failed):
        names = list_devices(cache.root)
        if names:
            _change_state(places, looked)


def list_read_errors(lines: Iterable[str], names: frozenset[str]) -> list[str]:
    """Pure: those of the kernel's lines that tell of lost data of one of these devices.

    What could not be written is no loss: whoever wrote it is told.
    """
    found = []
    for line in lines:
        match = re.fullmatch(_ERROR, line)  # compiled here: most hooks only ask for the doubt
        if match is None or re.sub(_LEG, r"\1\2", match[2]) not in names:
            continue
        if match[1].endswith("(READ)"):
            found.append(match[1])
    return found


def list_devices(root: Path, sys: Path = Path("/sys")) -> frozenset[str]:
    """The kernel's names of the disks that a directory lies on; none of tmpfs or a network.

    A partition's disk, the disks below LVM, a RAID or encryption. Raises OSError.
    """
    device = root.stat().st_dev
    if not os.major(device):
        return frozenset()
    found: set[str] = set()
    todo = [sys / f"dev/block/{os.major(device)}:{os.minor(device)}"]
    while todo:
        place = todo.pop().resolve(strict=True)
        if (place / "partition").exists():
            place = place.parent
        if place.name not in found:
            found.add(place.name)
            todo += (place / "slaves").glob("*")
    return frozenset(found)


def _read_kernel_log(deadline: Deadline) -> Iterator[tuple[int, str]]:
    """Yield what the kernel itself has logged, each record with its number, until the deadline.

    A record that a program has written, such as journald with ForwardToKMsg=, has no text here:
    the kernel gives it a facility other than its own (devkmsg_write in kernel/printk/printk.c).
    Raises OSError.
    """
    with open_descriptor(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK) as fd:
        while deadline.seconds_left() > 0:
            try:
                # priority,number,microseconds,flags;text (Documentation/ABI/testing/dev-kmsg)
                head, _, text = os.read(fd, LONGEST).decode(errors="replace").partition(";")
            except BlockingIOError:
                return
            except BrokenPipeError:  # overwritten before it was read: the next one follows
                continue
            if not head:
                return
            priority, number, *_ = head.split(",")
            is_kernels = int(priority) < FACILITY
            yield int(number), text.partition("\n")[0] if is_kernels else ""


def _change_state(
    places: NodePaths, changed: Callable[[DiskErrorState], DiskErrorState]
) -> DiskErrorState:
    """Notes what `changed` makes of what is known, under a lock; returns what was known before.

    Raises OSError, Failed.
    """
    folders.ensure_directory_with_mode(places.run, folders.PASSABLE)
    with lock.held(places.disk_errors.with_suffix(".lock"), LOCK_TIMEOUT):
        before = read_state(places)
        now = changed(before)
        if now != before:
            records.write(places.disk_errors, msgspec.json.encode(now))
    if now.since not in (0.0, before.since):
        _delete_step_records(places)
    return before


def _with_doubt(disk: DiskErrorState, clock: Clock, why: str) -> DiskErrorState:
    # Not 0, nor what it was, wherever the clock is: by this value the doubt is known.
    since = max(clock.wall(), 1.0)
    since += since == disk.since
    return msgspec.structs.replace(disk, since=since, why=why, proved=())


def _delete_step_records(places: NodePaths) -> None:
    """Has further steps of running jobs ask a helper, which declines (cache/step_record.py)."""
    for record in places.leases.glob("*.shown"):
        record.unlink(missing_ok=True)
