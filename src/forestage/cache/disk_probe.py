"""Whether the cache's disk answers: where a controller resets, or it is frozen, whoever asks hangs.

What waits for such a disk is in the kernel, where no signal reaches it: mkdir(2) of what exists and
open(2) with O_CREAT already wait for a file system that takes no writes. So a hook asks first, by a
probe (system/probe.py) that reads past the page cache, from each disk of a RAID, then makes and
removes a directory.

    what hangs    what is done
    reads         nothing is served; jobs read their sources
    writes        what is here is served, as nothing is written for a hit; nothing is copied

A probe narrows the time in which a hook hangs with its disk. hooks/hook_worker.py bounds it.
"""

import contextlib
import os
from functools import partial
from pathlib import Path

from forestage.cache import disk_errors
from forestage.cache.layout import Cache
from forestage.errors import Declined
from forestage.paths import NodePaths
from forestage.system import probe
from forestage.system.files import open_descriptor
from forestage.system.probe import HangReport, ReportPhase
from forestage.system.sha256 import sha256
from forestage.units import format_duration

READS, WRITES = "reads", "writes"
BLOCK = 4096  # bytes; what any disk reads at once
PART = 0.25  # of the time that is left: a probe must not take all of it
TOO_SHORT = 0.1  # seconds without an answer that prove nothing; a busy node may take them to fork


def probe_disk(places: NodePaths, cache: Cache, seconds_left: float = 60.0) -> HangReport | None:
    """What of the cache's disk does not answer; None where all does.

    `seconds_left` are the seconds that the caller has: a second at most, or a quarter of these, is
    waited.
    """
    return probe.find_hang(
        _probe_path(places, cache),
        partial(_probe_reads_and_writes, cache.root),
        PART * seconds_left,
    )


def find_known_hang(places: NodePaths, cache: Cache) -> HangReport | None:
    """What is known to hang, by who asks; for those who may change nothing, a directory neither."""
    return probe.find_known_hang(_probe_path(places, cache))


def _probe_path(places: NodePaths, cache: Cache) -> Path:
    return places.probes / f"cache-{sha256(os.fsencode(cache.root))[:16]}"


def check_readable(places: NodePaths, cache: Cache, seconds_left: float = 60.0) -> None:
    """Raises Declined where nothing can be read of the cache, or it cannot be made."""
    hang = probe_disk(places, cache, seconds_left)
    if hang is not None and (hang.phase == READS or not (cache.root / "format").exists()):
        raise declined_by_hang(cache, hang, seconds_left)


def check_writable(places: NodePaths, cache: Cache, seconds_left: float = 60.0) -> None:
    """Raises Declined where nothing can be written to the cache, nor removed."""
    hang = probe_disk(places, cache, seconds_left)
    if hang is not None:
        raise declined_by_hang(cache, hang, seconds_left)


def declined_by_hang(cache: Cache, hang: HangReport, seconds_left: float = 60.0) -> Declined:
    """Return why nothing is done with a cache whose disk gave no answer.

    `seconds_left` are the seconds that the caller had: the disk is not to blame if there were
    hardly any, because something else has used them up. Pure.
    """
    if hang.seconds < TOO_SHORT and PART * seconds_left < probe.LIMIT:
        return Declined("deadline", f"no time was left to ask the disk of {cache.root}")
    since = format_duration(hang.seconds)
    return Declined(
        "cache-hangs",
        f"the disk of {cache.root} does not answer ({hang.phase} have hung for {since})",
        "it is used again as soon as it answers; see the kernel's log",
    )


def _probe_reads_and_writes(root: Path, report: ReportPhase) -> None:
    """What the probe does. An error is an answer: who uses the cache next will meet it."""
    report(READS)
    with contextlib.suppress(OSError):  # no cache yet, or a file system without O_DIRECT
        _read_past_the_page_cache(root / "format")
    for one in _list_member_disks(root):
        with contextlib.suppress(OSError):  # its node is not there, or another's
            _read_past_the_page_cache(one)
    report(WRITES)
    spot = root / "probe"
    with contextlib.suppress(FileExistsError):  # of one that was killed
        spot.mkdir(mode=0o700)
    spot.rmdir()


def _list_member_disks(root: Path) -> list[Path]:
    """The disks below the cache's: a RAID's file lies on one of them, and another one may hang."""
    with contextlib.suppress(OSError):  # none that is known to this kernel
        return [
            Path("/dev", name.replace("!", "/")) for name in sorted(disk_errors.list_devices(root))
        ]
    return []


def _read_past_the_page_cache(file: Path) -> None:
    import mmap  # few hooks need it: it begins where a page does, as O_DIRECT wants it

    flags = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open_descriptor(file, flags) as fd, mmap.mmap(-1, BLOCK) as block:
        os.preadv(fd, [block], 0)
